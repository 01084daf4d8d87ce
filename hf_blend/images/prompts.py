# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The images of a prompt as chunks: where each is, what it is named, and its features from the store.

Features are an entry of their own beside the KV, so the vision tower is left out for an image that was seen before,
whatever share of its tokens is recomputed. They are kept only where the store gives them back bit for bit.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.blend_cache import BlendCache
from ..errors import PromptError, UnsupportedModelError
from ..model.canary import canary_of, is_of_model
from ..model.fingerprint import fingerprint
from ..model.modality import KINDS_OF_TOKENS, TEXT_ARGUMENTS
from ..prefill.request import PendingPrompt, Request
from ..prompt.content import LEAST_TOKENS, content_ids
from ..prompt.pieces import History, PromptBatch, Span, TextPrompt, check_lengths
from ..store import ChunkStore
from ..store.chunk import ChunkKey, ChunkKV
from .encoder import ENCODED, PIXELS, Features, ImageEncoder, digest_of

MARKS = KINDS_OF_TOKENS  # suffixes of the arguments that give each token's kind
OTHERS = ("pixel_values_videos", "input_features", "input_values", "inputs_embeds", ENCODED)


@dataclass(frozen=True)
class PromptImages:
    """The images of the prompts that are expected."""

    ids: list[list[int]]
    named: list[list[int]]
    spans: list[list[Span]]
    mask: Tensor
    output: Any
    features: list[Tensor]
    alone: Mapping[tuple[int, ...], Mapping[str, Any]]
    encoded: int

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the model's forward, in the place of pixels."""
        return {ENCODED: {"image": self.output}}

    def prompts(self, batch: PromptBatch | None) -> tuple[TextPrompt, ...]:
        """The prompts with the images as chunks, beside what is known of them."""
        others: Sequence[Any] = [TextPrompt(()) for _ in self.named] if batch is None else batch.prompts
        prompts = []
        for ids, images, prompt in zip(self.named, self.spans, others, strict=True):
            texts = [span for span in prompt.spans() if not any(span.overlaps(image) for image in images)]
            spans = tuple(sorted((*texts, *images), key=lambda span: span.start))
            opening = len(prompt.prefix) if prompt.opening is None else prompt.opening
            prompts.append(TextPrompt(tuple(ids), spans, opening, prompt.history))
        return tuple(prompts)

    def name(self, request: Request) -> Request:
        """Name the tokens of a forward, if it brings these images."""
        repeats, odd = divmod(len(request.rows), len(self.ids))
        numbers = [row // max(1, repeats) for row in range(len(request.rows))]
        if odd or not self._are_these(request.arguments, numbers):
            return request
        rows = []
        for row, number in zip(request.rows, numbers, strict=True):
            if self.ids[number][-len(row) :] != row:
                return request
            rows.append(self.named[number][-len(row) :])
        return replace(request, rows=rows)

    def _are_these(self, arguments: Mapping[str, Any], numbers: Sequence[int]) -> bool:
        """Whether a forward brings the features of these images; a beam search repeats them."""
        encoded = arguments.get(ENCODED)
        output = encoded.get("image") if isinstance(encoded, Mapping) else None
        if output is None or any(value is not None for name, value in encoded.items() if name != "image"):  # type: ignore[union-attr]
            return False
        if output is self.output and len(numbers) == len(self.ids):
            return True
        pooled = output.pooler_output
        rows = torch.cat([tensor.flatten(0, -2) for tensor in ([pooled] if isinstance(pooled, Tensor) else pooled)])
        return torch.equal(rows, torch.cat([self.features[number] for number in numbers]).to(rows.device))


def expect_images(cache: BlendCache, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """See `BlendCache.inputs_with_images`."""
    if inputs.get(PIXELS) is None:
        return inputs
    past = super(BlendCache, cache).get_seq_length()
    refuse_beside_images(inputs)
    expected = cache.prompts
    pending = expected.pending if expected.pending.is_of(inputs["input_ids"]) else PendingPrompt()
    if past and pending.batch is None:
        raise PromptError(
            f"images came for a cache that holds {past} tokens, but a prompt of inputs(history=…) is expected "
            "there. Call reset() and pass the whole conversation: its images are reused from the store."
        )
    images = name_images(cache.model, cache.store, cache.chunk_prefix_ids, inputs, past)
    prompts = images.prompts(pending.batch)
    if pending.batch is None:
        check_lengths([TextPrompt(tuple(ids)) for ids in images.ids], past, cache.traits.config)
        expected.history, expected.tokenizer = History(inputs["input_ids"].cpu(), images.mask), ""
    expected.pending = PendingPrompt(PromptBatch(prompts, inputs["input_ids"].cpu(), images.mask), pending.cached)
    expected.images, expected.beginnings = images, ()
    cache.watch.watch_model()
    return {**{name: value for name, value in inputs.items() if not name.startswith("pixel")}, **images.arguments}


def name_images(
    model: nn.Module, store: ChunkStore, chunk_prefix_ids: Sequence[int], inputs: Mapping[str, Any], past: int
) -> PromptImages:
    """Find the images of some prompts, and encode those whose features are not stored.

    Shapes: inputs `[batch, tokens]`.
    """
    encoder = ImageEncoder(model)
    _check_known(inputs, encoder.names)
    ids = inputs["input_ids"].cpu()
    mask = inputs.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu().bool()
    positions = ((ids == encoder.token_id) & real).nonzero()
    positions = positions[positions[:, 1] >= past].tolist()
    images = encoder.split(inputs)
    source = _Features(model, store, encoder)
    digests, counts = [digest_of(image) for image in images], _expected(images, positions)
    encoded = [source.of(*image_inputs) for image_inputs in zip(images, digests, counts, strict=True)]
    _check_count(encoded, len(positions))
    try:
        encoder.judge(source.identity, inputs, encoded)
    except UnsupportedModelError:
        if not source.loaded:
            raise
        encoded = [source.again(*image_inputs) for image_inputs in zip(images, digests, strict=True)]
        encoder.judge(source.identity, inputs, encoded)
    naming = _Naming(encoder, tuple(chunk_prefix_ids), ids, real, inputs)
    at = 0
    for image, digest, features in zip(images, digests, encoded, strict=True):
        naming.add(image, digest, features, positions[at : at + len(features[0])])
        at += len(features[0])
    return naming.result(encoded, source.encoded)


def refuse_beside_images(inputs: Mapping[str, Any]) -> None:
    """Refuse inputs beside which images cannot be chunks."""
    others = [name for name, value in inputs.items() if value is not None and name in OTHERS]
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if others or not isinstance(ids, Tensor) or ids.dim() != 2:
        raise PromptError(
            f"{others[0] if others else 'no input_ids [batch, tokens]'} came with pixel_values, but ids and images "
            "alone are expected here. Pass such a prompt to generate as it is: then the images are computed in place."
        )
    if mask is not None and mask.shape != ids.shape:
        raise PromptError(
            f"attention_mask has shape {tuple(mask.shape)}, expected that of input_ids, {tuple(ids.shape)}, with 0 on "
            "padding. Pass the one that the processor made."
        )


class _Naming:
    """Names the tokens of images, one after the other."""

    def __init__(
        self, encoder: ImageEncoder, sink: tuple[int, ...], ids: Tensor, real: Tensor, inputs: Mapping[str, Any]
    ) -> None:
        self._encoder, self._sink, self._inputs, self._real = encoder, sink, inputs, real
        self._ids, self._named = ids, ids.clone()
        self._marks = {name: value for name, value in inputs.items() if name.endswith(MARKS) and value is not None}
        self._order = real.long().cumsum(1) - 1  # place of each column among the real tokens
        self._spans: list[list[Span]] = [[] for _ in ids]
        self._features: list[list[Tensor]] = [[] for _ in ids]
        self._alone: dict[tuple[int, ...], dict[str, Any]] = {}

    def add(
        self, image: Mapping[str, Tensor], digest: str, features: Features, positions: Sequence[Sequence[int]]
    ) -> None:
        """Add the next image, at these rows and columns: a chunk from its first token to its last, row breaks too."""
        tokens, (row, first) = len(positions), positions[0]
        if any(other != row for other, _ in positions):
            raise PromptError(
                f"the placeholders of prompt {row} end within an image of {tokens} tokens, expected all of them in "
                "one prompt. Pass the images in the order of the prompts, as the processor made both."
            )
        self._features[row].append(features[0])
        if tokens < LEAST_TOKENS:
            return
        columns = slice(first, positions[-1][1] + 1)
        marks = {name: value[row, columns].tolist() for name, value in self._marks.items()}  # who sees whom, and where
        names = content_ids(f"{digest} {sorted(marks.items())}", tokens)
        self._named[row, [column for _, column in positions]] = torch.tensor(names)
        chunk = tuple(self._named[row, columns].tolist())
        self._spans[row].append(Span.whole(int(self._order[row, first]), chunk))
        if chunk not in self._alone:
            self._alone[chunk] = self._arguments(image, features, row, columns)

    def _arguments(self, image: Mapping[str, Tensor], features: Features, row: int, columns: slice) -> dict[str, Any]:
        """Arguments of the model's forward for one image alone behind the chunk prefix."""
        sink, device = len(self._sink), self._inputs["input_ids"].device
        ids = torch.tensor([[*self._sink, *self._ids[row, columns].tolist()]], device=device)
        arguments: dict[str, Any] = {"input_ids": ids, ENCODED: {"image": (features,)}, "logits_to_keep": 1}
        for name, value in self._inputs.items():
            if name in image and not name.startswith("pixel"):
                arguments[name] = image[name]
            elif name in self._marks:
                arguments[name] = nn.functional.pad(value[row : row + 1, columns], (sink, 0))  # 0: text
        return arguments

    def result(self, images: Sequence[Features], encoded: int) -> PromptImages:
        """What is known of all of them."""
        for arguments in self._alone.values():
            arguments[ENCODED] = {"image": self._encoder.output(arguments[ENCODED]["image"])}
        plain, named = (
            [row[real].tolist() for row, real in zip(ids, self._real, strict=True)] for ids in (self._ids, self._named)
        )
        width = images[0][0].new_zeros(0, images[0][0].shape[-1])
        features = [torch.cat([width, *parts]) for parts in self._features]
        output, mask = self._encoder.output(images), self._real.long()
        return PromptImages(plain, named, self._spans, mask, output, features, self._alone, encoded)


class _Features:
    """The features of images: in the store under a name of the vision tower, or encoded now."""

    def __init__(self, model: nn.Module, store: ChunkStore, encoder: ImageEncoder) -> None:
        self._model, self._store, self._encoder = model, store, encoder
        self.identity = fingerprint(model)
        self._tower = hashlib.sha256(f"hf_blend.images/1 {self.identity}".encode()).hexdigest()
        self._known: dict[str, Features] = {}
        self.encoded, self.loaded = 0, dict[str, ChunkKey]()

    def of(self, image: Mapping[str, Tensor], digest: str, tokens: int) -> Features:
        """The features of one image that is expected to take so many tokens; 0 if that is not known."""
        if digest not in self._known:
            self._known[digest] = self._stored(digest, tokens) or self._encoded(digest, image)
        return self._known[digest]

    def _key(self, digest: str, tokens: int) -> ChunkKey:
        return ChunkKey(self._tower, (), content_ids(digest, tokens), self._store.namespace)

    def _stored(self, digest: str, tokens: int) -> Features | None:
        key = self._key(digest, tokens) if tokens >= LEAST_TOKENS else None
        if key is None or not self._store.contains(key) or (stored := self._store.get(key)) is None:
            return None
        if not is_of_model(self._model, stored.canary):
            self._store.reject(key, "canary")
            return None
        self.loaded[digest] = key
        return tuple(level[0][0] for level in stored.layers)

    def again(self, image: Mapping[str, Tensor], digest: str) -> Features:
        """The features of one image, encoded again: what was stored is not what the tower makes."""
        if digest in self.loaded:
            self._store.reject(self.loaded.pop(digest), "features")
            self._known[digest] = self._encoded(digest, image)
        return self._known[digest]

    def _encoded(self, digest: str, image: Mapping[str, Tensor]) -> Features:
        features, self.encoded = self._encoder.encode(image), self.encoded + 1
        tokens = len(features[0])
        if tokens < LEAST_TOKENS or self._store.loads_in_part:
            return features
        key, layers = self._key(digest, tokens), tuple((level[None],) for level in features)
        entry = ChunkKV(key, layers, (), (-1,) * len(layers), canary_of(self._model))
        stored = self._store.put(entry)
        if not all(torch.equal(own[0].cpu(), put[0].cpu()) for own, put in zip(stored.layers, layers, strict=True)):
            self._store.delete(key)  # a codec rounds them
        return features


def _check_known(inputs: Mapping[str, Any], of_images: Sequence[str]) -> None:
    """Refuse tensors that may change an image's K and V but are not part of its name."""
    shape = inputs["input_ids"].shape
    for name, value in inputs.items():
        is_mark = name.endswith(MARKS) and getattr(value, "shape", None) == shape
        if isinstance(value, Tensor) and not (is_mark or name in TEXT_ARGUMENTS or name in of_images):
            raise PromptError(
                f"{name} {tuple(value.shape)} came with images, but what it changes in them is not known: expected "
                f"are {', '.join(of_images)} and kinds of tokens of the shape of input_ids. Pass such a prompt to "
                "generate as it is: then the images are computed in place."
            )


def _expected(images: Sequence[Mapping[str, Tensor]], positions: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens each image takes, as far as the placeholders tell; 0 where they do not."""
    runs: list[int] = []
    before: Sequence[int] = (-1, -1)
    for row, column in positions:
        if [row, column - 1] != list(before):
            runs.append(0)
        runs[-1] += 1
        before = (row, column)
    if len(runs) == len(images):
        return runs
    each, rest = divmod(len(positions), max(1, len(images)))
    is_alike = len({tuple(image[PIXELS].shape) for image in images}) == 1
    return [0 if rest or not is_alike else each] * len(images)


def _check_count(images: Sequence[Features], placeholders: int) -> None:
    tokens = sum(len(features[0]) for features in images)
    if tokens != placeholders or not images:
        raise PromptError(
            f"{len(images)} images make {tokens} tokens, expected {placeholders}, the placeholders in the prompts. "
            "Pass the ids and the images as one call of the processor made them."
        )
