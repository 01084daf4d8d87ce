# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models to ask: the two reference models that come with the package, or any other by path or hub id."""

import difflib
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import nn

from hf_blend.errors import ConfigError

BUNDLED = {  # name → folder
    "reference": str(files("hf_blend") / "bundled" / "reference"),  # short notes; binds in its first layers
    "chains": str(
        files("hf_blend") / "bundled" / "chains"
    ),  # long prompts; chains over chunks, up to the middle layers
}
REFERENCE, CHAINS = BUNDLED["reference"], BUNDLED["chains"]


def load_model(name: str | None = None) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer.

    Args:
        name: path or hub id, or the name of a bundled model, for which no network is used; None is the first of these.

    Returns:
        The model, in evaluation mode and in the dtype that it was saved in, and its tokenizer.

    Raises:
        ConfigError: there is no such folder, and no such model on the hub, or the hub cannot be reached.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = REFERENCE if name is None else BUNDLED.get(name, os.path.expanduser(name))
    if source.startswith((".", os.sep)) and not os.path.isdir(source):
        raise ConfigError(
            f"there is no folder {name!r}. Give a folder that a model was saved in, or the id of one on the hub, such "
            "as HuggingFaceTB/SmolLM2-135M-Instruct."
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
        return model, AutoTokenizer.from_pretrained(source)
    except OSError as error:
        near = difflib.get_close_matches(source, [path for path in os.listdir() if os.path.isdir(path)], n=1)
        meant = f" (but {near[0]!r} is)" if near else ""
        raise ConfigError(
            f"the model {name!r} cannot be loaded: it is no folder here{meant}. From the hub: "
            f"{str(error).splitlines()[0]} Give a folder that a model was saved in, or the id of one."
        ) from error


def quickstart_questions() -> list[dict[str, Any]]:
    """The bundled questions: prefix, chunks, question and answer of each."""
    text = (files("hf_blend") / "bundled" / "documents" / "questions.json").read_text("utf-8")
    found: list[dict[str, Any]] = json.loads(text)
    return found


def long_questions() -> list[dict[str, Any]]:
    """The questions that come with the chain model: prefix, chunks, question and answer of each."""
    found: list[dict[str, Any]] = json.loads((Path(CHAINS) / "questions.json").read_text("utf-8"))
    return found
