# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Say what a bug report needs: versions, device, what is installed."""

import re
from typing import Annotated, Any

import typer

from .output import Json, show

__all__ = ["env"]

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "tokenizers", "numpy")
REQUIRED = re.compile(r"([\w-]+).*extra == ['\"]([\w-]+)['\"]")  # in the metadata of a package
SWITCHES = ("HF_BLEND_HOME", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OMP_NUM_THREADS")
Model = Annotated[str | None, typer.Option(help="Also say how this model is seen: a path, a hub id, or tiny:TYPE.")]


def env(model: Model = None, json: Json = False) -> None:
    """Versions, device, memory, threads and extras; no path and no value of a variable is shown.

    Examples:
        hf-blend env
        hf-blend env --json
        hf-blend env --model tiny:llama --json
    """
    document = {**versions(), **_machine(), **_surroundings(), **(_model(model) if model else {})}
    show(document, as_json=json, title="for a bug report")


def versions() -> dict[str, Any]:
    """Versions of all that matters."""
    import platform
    from importlib import metadata

    from hf_blend import __version__

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    versions = {"hf_blend": __version__, "python": platform.python_version(), "system": platform.platform(terse=True)}
    versions |= {name: version(name) or "not installed" for name in PACKAGES}
    extras: dict[str, str] = {}  # what each lacks
    for line in (version("hf-blend") and metadata.requires("hf-blend")) or ():
        found = REQUIRED.match(line)
        if found and found[2] not in ("all", "dev"):
            lacking = "" if version(found[1]) else f" without {found[1]}"
            extras[found[2]] = extras.get(found[2], "") + lacking
    versions["extras"] = ", ".join(f"{extra}{lacking}" for extra, lacking in sorted(extras.items()))
    return versions


def _machine() -> dict[str, Any]:
    import psutil
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "devices": ", ".join(devices) or "cpu",
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "free_memory_bytes": psutil.virtual_memory().available,
    }


def _surroundings() -> dict[str, Any]:
    import os

    return {"set_variables": ", ".join(name for name in SWITCHES if name in os.environ) or "none"}


def _model(name: str) -> dict[str, Any]:
    from hf_blend.model.calibrate import rotary_styles
    from hf_blend.model.identity import fingerprint
    from hf_blend.model_names import load_model

    loaded = load_model(name)
    styles = sorted({style.__name__ for style in rotary_styles(loaded)})
    return {"model": type(loaded).__name__, "rotary_styles": ", ".join(styles), "fingerprint": fingerprint(loaded)}
