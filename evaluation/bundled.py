# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models to ask: the reference model that comes with the package, or any other by path or hub id."""

import json
from importlib.resources import files
from typing import Any

from torch import nn

REFERENCE = str(files("hf_blend") / "bundled" / "reference")  # folder of the bundled model


def load_model(name: str | None = None) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer.

    Args:
        name: path or hub id; None is the bundled reference model, for which no network is used.

    Returns:
        The model, in evaluation mode and in the dtype that it was saved in, and its tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = REFERENCE if name is None else name
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    return model, AutoTokenizer.from_pretrained(source)


def quickstart_questions() -> list[dict[str, Any]]:
    """The bundled questions: prefix, chunks, question and answer of each."""
    text = (files("hf_blend") / "bundled" / "documents" / "questions.json").read_text("utf-8")
    found: list[dict[str, Any]] = json.loads(text)
    return found
