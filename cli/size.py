# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Say how large a cache gets, from a model's config alone."""

from typing import Annotated, Any

import typer

from .output import Json, show

__all__ = ["size"]

Model = Annotated[str, typer.Argument(help="A path, a hub id, or tiny:TYPE; only its config is read.")]
Context = Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer together.")]
Batch = Annotated[int, typer.Option(min=1, help="Requests at once.")]
Dtype = Annotated[str | None, typer.Option(help="Of K and V, such as bfloat16; the model's own where left out.")]


def size(model: Model, context: Context = 32768, batch: Batch = 1, dtype: Dtype = None, json: Json = False) -> None:
    """Bytes of a cache, and what they would be without grouped heads, without windows, and in int8.

    Examples:
        hf-blend size tiny:gemma3_text --context 4096
        hf-blend size tiny:llama --context 131072 --batch 8 --dtype bfloat16 --json
        hf-blend size meta-llama/Llama-3.1-8B --context 131072  # network
    """
    import psutil

    from hf_blend.evaluation.bundled import KV_DTYPES, choose_dtype
    from hf_blend.evaluation.cache_size import cache_size
    from hf_blend.model_names import load_config

    kind: Any = None if dtype is None else choose_dtype(dtype, KV_DTYPES)
    size = cache_size(load_config(model), context_tokens=context, batch=batch, dtype=kind)
    free_bytes = psutil.virtual_memory().available
    document: dict[str, Any] = {
        "model": model, "context_tokens": context, "batch": batch, "dtype": str(size.dtype).removeprefix("torch."),
        "layers": size.num_layers, "bytes_per_token": size.bytes_per_token, "cache_bytes": size.nbytes,
        "without_groups_bytes": size.without_groups_nbytes, "without_windows_bytes": size.without_windows_nbytes,
        "int8_bytes": size.int8_nbytes, "free_memory_bytes": free_bytes,
        "requests_that_fit": free_bytes * batch // size.nbytes,
    }  # fmt: skip
    show(document, as_json=json, title=f"cache of {model}")
