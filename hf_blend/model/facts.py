# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What probes and the self-test found out about a model, kept beside a store: a second process begins at once.

A file holds the facts of one model in one state: fingerprint, device, dtype, attention, the versions of the libraries
that computed, and when this package's code was last written, so that edited code tests its models again. Only a
self-test that was passed is kept. What is damaged, or of another state, is left out, and the model is tested again.
"""

import hashlib
import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..store.tiers.base import EntryFault, as_fault
from ..store.tiers.disk import read_json, write_json
from ..version import __version__
from .anatomy import FACTS, found_facts, input_device, set_facts, text_config
from .checks import CHECKS
from .identity import fingerprint

logger = logging.getLogger(__name__)

FOLDER = "facts"  # in that of a store


def read_facts(model: nn.Module, store: Path) -> bool:
    """Take over what is known of a model that passed its self-test; False: nothing is, or it cannot be read."""
    state = _state(model)
    path = _path(store, state)
    try:
        content = read_json(path)
        with as_fault("it"):
            if content["state"] != state or content["digest"] != _digest(state, content["facts"]):
                raise ValueError("it is damaged, or of another model")
            facts = {name: FACTS[name].decode(value) for name, value in content["facts"].items()}
    except FileNotFoundError:
        return False
    except (OSError, EntryFault) as error:
        logger.warning("the facts in %s are left out, and the model is tested again: %s", path, error)
        return False
    set_facts(model, facts)
    return True


def write_facts(model: nn.Module, store: Path) -> None:
    """Keep what was found out about a model that passed; where the folder cannot be written it is in this process."""
    state = _state(model)
    facts = {name: FACTS[name].encode(value) for name, value in found_facts(model).items()}
    path = _path(store, state)
    try:
        write_json(path, {"state": state, "facts": facts, "digest": _digest(state, facts)})
    except OSError as error:
        logger.info("what was found out about a model cannot be kept in %s (%s)", path, error)


def _state(model: nn.Module) -> dict[str, Any]:
    """All that facts depend on, and the checks that were passed."""
    device = input_device(model)
    kernels = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        kernels = torch.cuda.get_device_name(device)
    return {
        "fingerprint": fingerprint(model),
        "device": f"{device.type} {kernels}",
        "dtype": str(model.dtype),
        "attention": str(text_config(model)._attn_implementation),
        "versions": [__version__, torch.__version__, transformers.__version__],
        "code": _last_written(),
        "checks": sorted(check.name for check in CHECKS.values() if check.first_use),
    }


@cache
def _last_written() -> int:
    """When the newest file of this package's code was written, in nanoseconds; the version says nothing of edits."""
    package = Path(__file__).parents[1]
    return max(path.stat().st_mtime_ns for path in package.rglob("*.py"))


def _path(store: Path, state: dict[str, Any]) -> Path:
    return store / FOLDER / f"{_digest(state)}.json"


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
