# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models to time: of a known shape with random weights, since speed does not depend on them, or one of the user's."""

from typing import Any

import torch
from torch import nn

from hf_blend.errors import ConfigError, suggest
from hf_blend.model.anatomy import input_device, text_config

from ..bundled import choose_dtype, open_model

OWN = "model:"  # before the path or id of a model that is no shape


def llama(sizes: str, vocabulary: int, positions: int, **more: Any) -> dict[str, Any]:
    """Return settings of a llama from "hidden, MLP, layers, heads, KV heads"."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    settings = dict(zip(names, map(int, sizes.split()), strict=True))
    return {"model_type": "llama", **settings, "vocab_size": vocabulary, "max_position_embeddings": positions, **more}


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": llama("64 128 8 4 2", 512, 8192),
    "smollm2-135m": llama("576 1536 30 9 3", 49152, 8192, tie_word_embeddings=True),
    "llama-3.1-8b": llama("4096 14336 32 32 8", 128256, 131072),
    "mistral-7b": llama("4096 14336 32 32 8", 32768, 32768, model_type="mistral", sliding_window=None),
}


def wait_for(model: nn.Module) -> None:
    """Wait until the model's device has done what was asked of it, so that a clock shows it."""
    if (device := input_device(model)).type == "cuda":
        torch.cuda.synchronize(device)


def timed_model(shape: str, dtype: str, device: str, seed: int = 0) -> nn.Module:
    """Load or make the model that a bench times."""
    if shape.startswith(OWN):
        return open_model(shape.removeprefix(OWN), device, dtype).load()
    kind = choose_dtype(dtype)
    return random_model(shape, kind if isinstance(kind, torch.dtype) else torch.float32, device, seed)


def random_pieces(model: nn.Module, chunks: int, chunk_tokens: int, question_tokens: int, seed: int) -> dict[str, Any]:
    """Make up the ids of a prompt: BOS, chunks and a question."""
    generator, vocabulary = torch.Generator().manual_seed(seed), text_config(model).vocab_size
    draw = lambda tokens: torch.randint(3, vocabulary, (tokens,), generator=generator).tolist()  # noqa: E731
    made = [draw(chunk_tokens) for _ in range(chunks)]
    return {"prefix": [1], "chunks": made, "question": draw(question_tokens)}


def random_model(shape: str, dtype: torch.dtype, device: str, seed: int = 0) -> nn.Module:
    """Build a model of a known shape with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if shape not in SHAPES:
        raise ConfigError(f"there is no shape named {shape!r}. {suggest(shape, SHAPES)}")
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(
        settings.pop("model_type"), **settings, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
