# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every model type that reads images: images as chunks are exact, refused with a reason, or not judged.

A prompt has texts and two images. With every token recomputed it has the logits of the stock model: when nothing of it
is stored; when the same texts and images come in another order, and none is encoded or stored again; and when one of
the images is another behind the same ids.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.blend_cache import BlendCache
from ..errors import UnsupportedModelError
from ..model.anatomy import full_cache
from ..model.images import cannot_encode_ahead
from ..store import ChunkStore
from .floor import attending, distance
from .image_zoo import KINDS, Arguments, image_arguments, image_types, picture, tiny_image_model
from .ladder import FAILURES
from .subject import FLOAT32_LOGITS
from .zoo import NOT_JUDGED, WRONG_CONFIG, refused_by_config

PREFIX, QUESTION = (1, 5, 6, 7), (7, 8, 9, 11)
TEXTS = (tuple(range(10, 26)), tuple(range(30, 50)), tuple(range(52, 70)))
PICTURE = -1  # an image in the orders below
ORDERS = ((0, PICTURE, PICTURE, 1, 2), (PICTURE, 0, 1, PICTURE, 2), (PICTURE, 0, 1, PICTURE, 2))
SEEDS, ENCODED = ((0, 1), (1, 0), (1, 2)), (2, 0, 1)  # of the two images of each prompt; how many of them are new


def verify_image_types(types: Iterable[str] | None = None) -> Iterator[dict[str, Any]]:
    """Blend a prompt with images in a tiny random model of each type."""
    for kind in image_types() if types is None else types:
        started = time.perf_counter()
        reason, error = _verdict(kind)
        row = {"model": kind, "supported": not reason, "reason": reason or None, "max_abs_error": error}
        yield {**row, "seconds": round(time.perf_counter() - started, 1)}


def _verdict(kind: str) -> tuple[str, float | None]:
    """Why the images of a type are no chunks, "" where they are; and the largest error."""
    reason = _refusal(kind)
    if reason:
        return reason, None
    try:
        return _measured(kind, tiny_image_model(kind))
    except UnsupportedModelError as error:
        return str(error), None
    except ImportError as error:
        return f"{NOT_JUDGED}no tiny model of type {kind!r} can be built here: {' '.join(str(error).split())}", None
    except (*FAILURES, AssertionError, OSError) as error:
        return f"crashed: {type(error).__name__}: {error}", None


def _refusal(kind: str) -> str:
    """What the class and the default config of a type say against its images as chunks, or that it is not judged."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    name = names if isinstance(names, str) else names[0]
    try:
        config = transformers.AutoConfig.for_model(kind)
        complaint = refused_by_config(kind) or cannot_encode_ahead(getattr(transformers, name), config)
    except WRONG_CONFIG as error:
        return f"{NOT_JUDGED}the class of {kind!r} cannot be had: {error}"
    if complaint or kind in KINDS:
        return complaint
    tower = getattr(getattr(config, "vision_config", None), "architecture", None)
    if isinstance(tower, str):
        return f"{NOT_JUDGED}the tower of {kind!r} is timm's {tower}, which has no tiny form. Try a checkpoint."
    return f"{NOT_JUDGED}no tiny model of type {kind!r} with images is known. Try a checkpoint of it instead."


@torch.no_grad()
def _measured(kind: str, model: nn.Module) -> tuple[str, float]:
    """What is wrong, "" if nothing; and the largest error of the last logits."""
    store, worst, allowed = ChunkStore.open("memory://"), 0.0, FLOAT32_LOGITS
    store.add(model, None, TEXTS)
    for order, seeds, encoded in zip(ORDERS, SEEDS, ENCODED, strict=True):
        pieces = [picture(kind) if one == PICTURE else TEXTS[one] for one in order]
        ids = [*PREFIX, *(token for piece in pieces for token in piece), *QUESTION]
        inputs = image_arguments(kind, torch.tensor([ids]), seeds)
        expected = _stock(model, inputs)
        with attending(model, "eager"):
            allowed = max(allowed, distance(_stock(model, inputs), expected))
        cache = BlendCache(model, store, recompute_ratio=1.0)
        given = cache.inputs_with_images(**inputs)
        got = model(**given, past_key_values=cache, logits_to_keep=1, use_cache=True).logits
        worst = max(worst, distance(got, expected))
        found = cache.report.encoded_images, cache.report.computed_chunks, cache.report.loaded_chunks
        if found != (encoded, encoded, len(pieces) - encoded):
            return f"wrong: {found} images encoded, chunks stored and loaded, expected {encoded} new ones", worst
    return ("" if worst <= allowed else f"wrong: logits are off by {worst:.2g}, {allowed:.2g} is allowed"), worst


def _stock(model: nn.Module, inputs: Arguments) -> Tensor:
    """The last logits of the model alone."""
    logits: Tensor = model(**inputs, past_key_values=full_cache(model), logits_to_keep=1, use_cache=True).logits
    return logits
