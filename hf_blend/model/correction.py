# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What text before a chunk adds to its K and V: a linear map a layer, fitted once per model, applied at storing.

A chunk is computed behind a short text (`context`), so its tokens look at less than they would in a prompt. Much of
what that changes is the same whatever the other text is, and can be read off its own K, as at position 0, and V:
a map is found by reduced rank regression on unlabelled text, chunks as they are stored against the same chunks in
prompts. It costs nothing when a prompt is blended.

Source: ours. Measured beside the published rules in benchmarks/results/frontier.json.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ConfigError, UnsupportedModelError
from ..prompt.pieces import Span
from ..rotary.base import RotaryStyle, compose
from ..store.chunk import ChunkKey, ChunkKV
from ..threads import cached_property
from .anatomy import default_sink
from .calibrate import rotary_styles
from .capture import capture, capture_alone, cut_chunk
from .fingerprint import fingerprint

__all__ = ["ContextCorrection"]

FORMAT = "hf_blend.correction/4"
DECAYS = (2.0, 8.0, 32.0)  # tokens over which the beginning of a chunk is known from the rest
RIDGE = 0.01  # of the mean square of each input
SINK = 0.3  # of the median size of V in a chunk; an attention sink has less, and is left as it is
RANK = 64  # of a map; 16 leaves as much on SmolLM2
MAX_BYTES = 19_000_000
KV = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class ContextCorrection:
    """A fitted correction. Make one with `fit` or `load`, and open a store with it: `ChunkStore.open(correction=…)`.

    Attributes:
        model: fingerprint of the model that it was fitted for; another model refuses it.
        maps: layer → (`[inputs, rank]`, `[rank, outputs]`) float32. The inputs are K of all heads as at position 0,
            V of all heads, 1, and how near the token is to the beginning of its chunk; the outputs are what is added
            to K and V.
        prefix: the tokens that chunks were computed behind when it was fitted, and are computed behind with it.
    """

    model: str
    maps: dict[int, KV]
    prefix: tuple[int, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> "ContextCorrection":
        """Read a file that `save` wrote."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(Path(path).expanduser(), "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"the correction {str(path)!r} cannot be read: {error}. Expected a file of `hf-blend fit`."
            ) from error
        prefix = tensors.pop("prefix", torch.ones(1))
        tensors = {name: one.float() for name, one in tensors.items()}
        layers = sorted(int(name.removesuffix(".down")) for name in tensors if name.removesuffix(".down").isdecimal())
        maps = {one: (tensors[f"{one}.down"], tensors.get(f"{one}.up", torch.empty(0))) for one in layers}
        are_maps = all(
            down.dim() == up.dim() == 2 and down.shape[1] == up.shape[0] and bool((down.sum() + up.sum()).isfinite())
            for down, up in maps.values()
        )
        is_text = prefix.dim() == 1 and prefix.dtype == torch.int64
        if not is_text or about.get("format") != FORMAT or not maps or not are_maps:
            raise ConfigError(
                f"the file {str(path)!r} holds {len(tensors)} tensors of the format {about.get('format')!r}, expected "
                f"a finite map a layer of the format {FORMAT!r}. Fit one with `hf-blend fit`."
            )
        return cls(about.get("model", ""), maps, tuple(prefix.tolist()))

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file of at most 20 MB."""
        from safetensors.torch import save_file

        save_file(self._tensors, Path(path).expanduser(), {"format": FORMAT, "model": self.model})

    @property
    def _tensors(self) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for layer, pair in sorted(self.maps.items()):
            for name, part in zip(("down", "up"), pair, strict=True):
                found[f"{layer}.{name}"] = part.to(torch.float16).contiguous().cpu()
        return {**found, "prefix": torch.tensor(self.prefix, dtype=torch.int64)}

    @cached_property
    def digest(self) -> str:
        """Name the content, in 64 hex digits."""
        state = hashlib.sha256(f"{FORMAT}\0{self.model}".encode())
        for name, part in self._tensors.items():
            state.update(f"{name} {tuple(part.shape)}".encode() + part.numpy().tobytes())
        return state.hexdigest()

    def identity(self, model: str) -> str:
        """Name what computes chunks of a model, given by its fingerprint, with this correction, in 64 hex digits."""
        if model != self.model:
            raise ConfigError(
                f"the correction was fitted for the model {self.model:.12}…, expected {model:.12}…, which is used. "
                "Fit one for it with `hf-blend fit`, or open the store without a correction."
            )
        return hashlib.sha256(f"{model}\0{self.digest}".encode()).hexdigest()

    def corrected(self, model: nn.Module, chunk: ChunkKV) -> ChunkKV:
        """Add to a chunk what a prompt is expected to add."""
        layers = list(chunk.layers)
        for layer, style in enumerate(rotary_styles(model)):
            if layer in self.maps:
                known = features_of(chunk, layer, style)
                inputs, (down, up) = beside(known), self.maps[layer]
                if (len(down), up.shape[1]) != (inputs.shape[1], known.shape[1]):
                    raise ConfigError(
                        f"layer {layer} of the correction maps {len(down)} numbers to {up.shape[1]}, expected "
                        f"{inputs.shape[1]} to {known.shape[1]}. Fit one for this model with `hf-blend fit`."
                    )
                added = addition(inputs, not_sinks(chunk, layer), (down, up))
                moved = states_of(known + added, chunk, layer, style)
                layers[layer] = (*moved, *layers[layer][2:])
        return replace(chunk, layers=tuple(layers))

    @classmethod
    @torch.no_grad()
    def fit(
        cls,
        model: nn.Module,
        prompts: Iterable[tuple[Sequence[int], Sequence[Span]]],
        *,
        chunk_prefix_ids: Sequence[int] | None = None,
        rank: int | None = None,
    ) -> "ContextCorrection":
        """Fit it to a model: chunks as they are stored against the same chunks in prompts.

        Prompts are ids, and where their chunks are: some 30,000 tokens of text of any kind. Chunks are computed behind
        the model's BOS unless said otherwise; without a rank it is 64, or what keeps the file below 20 MB.
        """
        sink = default_sink(model) if chunk_prefix_ids is None else tuple(chunk_prefix_ids)
        identity, styles, sums = fingerprint(model), rotary_styles(model), dict[int, _Sums]()
        for ids, spans in prompts:
            captured = capture(model, torch.tensor([[*ids]]))
            keys = [ChunkKey(identity, sink, tokens) for _, tokens, _, _ in spans]
            alone = capture_alone(model, keys)
            for key, (start, tokens, first, count) in zip(keys, spans, strict=True):
                there = cut_chunk(
                    captured, ChunkKey(identity, (), tokens[first : first + count]), start, start + count
                )
                for layer, style in enumerate(styles):
                    if len(there.layers[layer]) >= 2:
                        own = features_of(alone[key], layer, style)
                        part, fit = slice(first, first + count), not_sinks(alone[key], layer)[first : first + count, 0]
                        target = features_of(there, layer, style) - own[part]
                        sums.setdefault(layer, _Sums()).add(beside(own)[part][fit], target[fit])
        if not sums:
            raise UnsupportedModelError(
                f"{type(model).__name__} left no layer to correct, got {len(styles)} layers, expected at least one "
                "that keeps K and V of each token, and prompts with chunks. Use the store without a correction."
            )
        most = MAX_BYTES // (2 * sum(sum(one.cross.shape) for one in sums.values()))
        maps = {layer: one.solve(rank or max(min(RANK, most), 1)) for layer, one in sums.items()}
        return cls(identity, maps, sink)


class _Sums:
    """What a regression needs of its samples, summed."""

    def __init__(self) -> None:
        self.gram: Tensor = torch.zeros((), dtype=torch.float64)
        self.cross = self.squares = self.gram
        self.count = 0

    def add(self, inputs: Tensor, target: Tensor) -> None:
        """Add samples: `[tokens, inputs]` and `[tokens, outputs]`."""
        inputs, target = inputs.cpu().double(), target.cpu().double()
        self.gram, self.cross = self.gram + inputs.T @ inputs, self.cross + inputs.T @ target
        self.squares, self.count = self.squares + target.square().sum(0), self.count + len(inputs)

    def solve(self, rank: int) -> KV:
        """Find the map of a rank that leaves the least, each output measured by its own size."""
        ridge = RIDGE * self.gram.diagonal().diag() + 1e-6 * torch.eye(len(self.gram)).double()
        weights = torch.linalg.solve(self.gram + ridge, self.cross)
        scale = (self.squares / self.count).sqrt().clamp_min(1e-6)
        if rank >= min(weights.shape):
            return weights.half().float(), torch.eye(weights.shape[1])
        scaled = weights / scale
        axes = torch.linalg.eigh(scaled.T @ self.gram @ scaled).eigenvectors[:, -rank:]
        return (scaled @ axes).half().float(), (axes.T * scale).half().float()  # as they are saved


def features_of(chunk: ChunkKV, layer: int, style: type[RotaryStyle]) -> Tensor:
    """K as at position 0 and V of a layer, all heads side by side: `[tokens, outputs]` float32."""
    states = _rotated(chunk.layers[layer][:2], chunk, layer, style)
    return torch.cat([part.transpose(0, 1).flatten(1) for part in states], 1)


def states_of(features: Tensor, chunk: ChunkKV, layer: int, style: type[RotaryStyle]) -> Sequence[Tensor]:
    """(K, V) as stored, `[kv_heads, tokens, head_dim]`: the way back from `features_of`."""
    like = chunk.layers[layer][:2]
    parts = features.split([one.shape[0] * one.shape[2] for one in like], 1)
    states = [part.unflatten(1, (one.shape[0], -1)).transpose(0, 1) for part, one in zip(parts, like, strict=True)]
    rotated = _rotated(states, chunk, layer, style, back=True)
    return [part.to(one.dtype).contiguous() for part, one in zip(rotated, like, strict=True)]


def _rotated(
    states: Sequence[Tensor], chunk: ChunkKV, layer: int, style: type[RotaryStyle], back: bool = False
) -> list[Tensor]:
    """(K, V) in float32, K turned to position 0, or back to where the chunk was computed."""
    found, number = [part.float() for part in states], chunk.layer_table[layer]
    if number >= 0 and style.turns:
        table = chunk.tables[number]
        zero = torch.ones_like(table[0]), torch.zeros_like(table[1])
        keys = found[style.slot].contiguous()
        found[style.slot] = torch.empty_like(keys)
        style.move(keys, compose(style, *((zero, table) if back else (table, zero))), found[style.slot])
    return found


def beside(features: Tensor) -> Tensor:
    """Features, 1, and how near each token is to the beginning of its chunk: `[tokens, inputs]`."""
    offsets = torch.arange(len(features), device=features.device)
    near = [torch.exp(-offsets / tokens) for tokens in DECAYS]
    return torch.cat([features, torch.stack([torch.ones_like(near[0]), *near], 1)], 1)


def not_sinks(chunk: ChunkKV, layer: int) -> Tensor:
    """Return True for the tokens of a layer that are corrected: `[tokens, 1]`.

    What a map adds to an attention sink, it multiplies: the sink's V is small, and its K unlike all others.
    """
    size = chunk.layers[layer][1].float().square().sum((0, 2)).sqrt()
    return (size >= SINK * size.median())[:, None]


def addition(inputs: Tensor, corrected: Tensor, maps: KV) -> Tensor:
    """What a map adds to features: `[tokens, outputs]`."""
    down, up = (part.to(inputs.device) for part in maps)
    return inputs @ down @ up * corrected
