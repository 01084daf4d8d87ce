# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One keyword for `generate`: `custom_generate=blended(store)` reuses what is stored of a prompt, wherever it stands.

    store.add(model, tokenizer, documents)
    model.generate(**tokenizer(prompt, return_tensors="pt"), custom_generate=blended(store), max_new_tokens=64)

`blended(store, sparse=0.25)` also decodes over a quarter of the blocks of the context (`hf_blend.sparse`).

Greedy search, sampling and beam search run as without it. transformers does not hand a streamer or an assistant to a
callable: for those make a `BlendCache` and pass it to `generate` itself.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.generation.utils import GENERATION_MODES_MAPPING

from . import plugins
from .cache.blend_cache import BlendCache
from .config import BlendConfig
from .errors import ConfigError
from .model.anatomy import KEYWORD, cache_among, cache_argument, without_cache
from .prefill.report import BlendReport
from .store import ChunkStore

if TYPE_CHECKING:
    from .sparse.config import SparseConfig
    from .sparse.lock import SparseMetrics


class Blended:
    """What `generate` calls in place of its own decoding."""

    def __init__(self, store: ChunkStore, config: BlendConfig, sparse: "SparseConfig | None" = None) -> None:
        self.store, self.config, self.sparse = store, config, sparse
        self.report: BlendReport | None = None
        self.sparse_metrics: SparseMetrics | None = None

    def __call__(self, model: nn.Module, input_ids: Tensor, *, generation_config: Any, **kwargs: Any) -> Any:
        """Decode as `generate` would, with a cache that brings stored chunks.

        Shapes: input_ids `[batch, tokens]`.
        """
        past = cache_among(kwargs)
        if past is not None and past.get_seq_length() > 0:
            raise ConfigError(
                f"the cache has {past.get_seq_length()} tokens, but custom_generate=blended(...) begins with "
                f"none. Pass a BlendCache as {KEYWORD}, and no custom_generate."
            )
        mode = generation_config.get_generation_mode(kwargs.get("assistant_model"))
        method = getattr(type(model), GENERATION_MODES_MAPPING[mode], None)
        if method is None:
            raise ConfigError(f"{mode.value} is no way of transformers itself. Use sampling, greedy or beam search.")
        cache = BlendCache(model, self.store, self.config)
        kwargs = {**without_cache(kwargs), **cache_argument(model, cache)}
        decoding: Any = nullcontext()
        if self.sparse is not None:
            decoding = plugins.extension("sparse.decoding").sparse_decoding(model, cache, self.sparse)
        with decoding as session:
            output = method(model, input_ids, generation_config=generation_config, **kwargs)
        self.report, self.sparse_metrics = cache.report, session and session.metrics
        return output


def blended(
    store: ChunkStore,
    config: BlendConfig | None = None,
    *,
    sparse: "float | str | Mapping[str, Any] | SparseConfig | None" = None,
    **settings: Any,
) -> Blended:
    """Make a `custom_generate` for `generate`: stored chunks are found in any prompt. It may be used again and again.

    Args:
        store: where chunks are kept.
        config: the settings; None takes the defaults.
        sparse: share of the context's blocks that a decoding step looks at, above 0 up to 1; "auto", a quarter where
            that was measured to be faster; or fields of `hf_blend.sparse.config.SparseConfig`, see
            docs/holding_less.md. None: all.
        **settings: fields of `BlendConfig` that differ from `config`, such as `recompute_ratio=0.15`.

    Returns:
        The callable.

    Raises:
        ConfigError: a setting is refused.
    """
    merged = BlendConfig.from_dict({**(config or BlendConfig()).to_dict(), **settings})
    chosen = None
    if sparse is not None:
        chosen = plugins.extension("sparse.config").parsed(sparse)
    return Blended(store, merged, chosen)
