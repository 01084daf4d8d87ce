# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A model changes after its chunks were stored: these must not be used, and what it computes then not by the old one.

The ways are those of training, steering, serving and research: none is a trick that no user plays, and most go round
everything that torch counts. Truth at every moment is what stock transformers computes with the model as it then is.
"""

import copy
import gc
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache
from hf_blend.errors import HfBlendError
from hf_blend.model.fingerprint import fingerprint
from hf_blend.store import ChunkKey, ChunkStore

from .fault import FaultClass, Verdict
from .oracle import Truth, is_near, stock_kv, stock_logits
from .world import SECRET, SINK

Change = Callable[[Any, random.Random], AbstractContextManager[None]]
IDS = torch.tensor([[5, 9, 23, 77, 41, 12, 8, 60]])


def _weight(model: Any, draw: random.Random) -> Tensor:
    """A matrix that the KV of some layer depends on."""
    layers = model.model.layers
    later, last = draw.choice(layers[:-1]), layers[-1]
    inner = [later.mlp.down_proj, later.self_attn.v_proj, later.self_attn.o_proj]
    return draw.choice([*inner, last.self_attn.k_proj, last.self_attn.v_proj, model.model.embed_tokens]).weight


LASTING: dict[str, Change] = {}


def lasting(name: str) -> Callable[[Callable[[Any, random.Random], None]], Any]:
    """Register a change that is not undone."""

    def register(change: Callable[[Any, random.Random], None]) -> Any:
        @contextmanager
        def made(model: Any, draw: random.Random) -> Iterator[None]:
            change(model, draw)
            yield

        LASTING[name] = made
        return change

    return register


def of_adapter(name: str) -> Callable[[Callable[["_Adapter"], None]], Any]:
    """Register a change of the one adapter of a model, which it had before it served."""

    def register(change: Callable[[_Adapter], None]) -> Any:
        found = lambda model: next(module for module in model.modules() if isinstance(module, _Adapter))  # noqa: E731
        return lasting(name)(lambda model, _: change(found(model)))

    return register


def _train(model: Any, make: Callable[[list[Tensor]], torch.optim.Optimizer], frozen: int = 0) -> None:
    """One step of an optimizer, all that is frozen left out."""
    fixed = [model.model.embed_tokens, *model.model.layers[:frozen]] if frozen else []
    held = {id(weight) for module in fixed for weight in module.parameters()}
    optimizer = make([weight for weight in model.parameters() if id(weight) not in held])
    with torch.enable_grad():
        model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)


@lasting("a fused step of AdamW")
def _adamw(model: Any, draw: random.Random) -> None:
    _train(model, lambda weights: torch.optim.AdamW(weights, lr=0.02, fused=True))


@lasting("a fused step, first layer frozen")
def _frozen(model: Any, draw: random.Random) -> None:
    _train(model, lambda weights: torch.optim.AdamW(weights, lr=0.05, fused=True), frozen=1)


@lasting("a step of SGD")
def _sgd(model: Any, draw: random.Random) -> None:
    _train(model, lambda weights: torch.optim.SGD(weights, lr=0.1, foreach=True))


@lasting("a weight scaled through .data")
def _data_scaled(model: Any, draw: random.Random) -> None:
    _weight(model, draw).data.mul_(1.1)


@lasting("a weight copied through .data")
def _data_copied(model: Any, draw: random.Random) -> None:
    weight = _weight(model, draw)
    weight.data.copy_(torch.randn_like(weight))


@lasting("all weights averaged through .data")
def _averaged(model: Any, draw: random.Random) -> None:
    for weight in model.parameters():  # as an exponential moving average is swapped in
        weight.data.lerp_(torch.randn_like(weight), 0.05)


@lasting("a weight written through numpy")
def _numpy(model: Any, draw: random.Random) -> None:
    _weight(model, draw).detach().numpy()[:] *= 1.1


@lasting("an adapter merged by hand")
def _merged(model: Any, draw: random.Random) -> None:
    weight = _weight(model, draw)  # a LoRA merged by hand
    weight.data += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1]) * 0.05


@lasting("a weight changed in place")
@torch.no_grad()
def _in_place(model: Any, draw: random.Random) -> None:
    _weight(model, draw).mul_(1.1)


@lasting("a weight replaced")
def _replaced(model: Any, draw: random.Random) -> None:
    layer = draw.choice(model.model.layers)
    layer.self_attn.v_proj.weight = nn.Parameter(layer.self_attn.v_proj.weight.detach() * 1.1)


@lasting("a state dict loaded")
def _loaded(model: Any, draw: random.Random) -> None:
    model.load_state_dict({name: weight * 1.02 for name, weight in model.state_dict().items()})


@lasting("half() and back")
def _half_and_back(model: Any, draw: random.Random) -> None:
    model.half().float()


@lasting("a weight of inference mode")
def _in_inference_mode(model: Any, draw: random.Random) -> None:
    """Weights that were built there have no version that torch counts."""
    with torch.inference_mode():
        for module in model.modules():
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    module._parameters[name] = nn.Parameter(weight.clone(), requires_grad=False)
    fingerprint(model)  # as of a model that has served already
    with torch.inference_mode():
        _weight(model, draw).mul_(1.1)


@lasting("two MLPs swapped")
def _other_layers(model: Any, draw: random.Random) -> None:
    one, two = draw.sample(range(len(model.model.layers) - 1), 2)
    layers = model.model.layers
    layers[one].mlp, layers[two].mlp = layers[two].mlp, layers[one].mlp


@lasting("other frequencies")
def _frequencies(model: Any, draw: random.Random) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(0.9)


@lasting("attention_scaling")
def _attention_scaling(model: Any, draw: random.Random) -> None:
    model.model.rotary_emb.attention_scaling *= 1.2


@lasting("scaling")
def _scaling(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers[:-1]).self_attn.scaling *= 2


@lasting("act_fn")
def _activation(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers[:-1]).mlp.act_fn = nn.ReLU()


@lasting("the epsilon of a norm")
def _epsilon(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers).input_layernorm.variance_epsilon = 0.5


@lasting("is_causal")
def _not_causal(model: Any, draw: random.Random) -> None:
    model.model.layers[draw.randrange(2)].self_attn.is_causal = False


@lasting("forward of one module")
def _forward_of_one(model: Any, draw: random.Random) -> None:
    module = draw.choice(model.model.layers[:-1]).mlp
    stock = module.forward
    module.forward = lambda hidden: stock(hidden) * 1.2


@lasting("a method bound to one module")
def _method_of_one(model: Any, draw: random.Random) -> None:
    module = draw.choice(model.model.layers[:-1]).mlp

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)))

    module.forward = MethodType(forward, module)


class _Adapter(nn.Module):
    """Low-rank adapters round a projection, one of which acts; which one says a text, how strongly a number."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.acting, self.strength = base, "a", 1.0
        self.inner = nn.ParameterDict({name: torch.randn(base.in_features, 2) * 0.1 for name in "ab"})
        self.outer = nn.ParameterDict({name: torch.randn(2, base.out_features) * 0.1 for name in "ab"})

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.acting:
            return self.base(hidden)
        return self.base(hidden) + self.strength * hidden @ self.inner[self.acting] @ self.outer[self.acting]


def _with_adapters(model: Any, draw: random.Random) -> None:
    attention = draw.choice(model.model.layers).self_attn
    attention.v_proj = _Adapter(attention.v_proj)


@of_adapter("another adapter")
def _chosen(adapter: _Adapter) -> None:
    adapter.acting = "b"


@of_adapter("an adapter switched off")
def _off(adapter: _Adapter) -> None:
    adapter.acting = ""


@of_adapter("a stronger adapter")
def _stronger(adapter: _Adapter) -> None:
    adapter.strength = 3.0


@of_adapter("a trained adapter")
def _trained_adapter(adapter: _Adapter) -> None:
    weights = [adapter.inner["a"], adapter.outer["a"]]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _hook(model: Any, draw: random.Random) -> AbstractContextManager[None]:
    """A hook: something is added behind a layer's MLP."""
    direction = torch.randn(model.config.hidden_size)
    module = draw.choice(model.model.layers[:-1]).mlp
    return _removed(module.register_forward_hook(lambda module, args, output: output + direction))


def _pre_hook(model: Any, draw: random.Random) -> AbstractContextManager[None]:
    layer = draw.choice(model.model.layers[:-1])
    return _removed(layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:])))


def _global_hook(model: Any, draw: random.Random) -> AbstractContextManager[None]:
    module = draw.choice(model.model.layers[:-1]).mlp
    hook = lambda one, args, output: output * 1.3 if one is module else None  # noqa: E731
    return _removed(nn.modules.module.register_module_forward_hook(hook))


@contextmanager
def _class_patched(model: Any, draw: random.Random) -> Iterator[None]:
    kind = type(model.model.layers[0].mlp)
    stock = kind.forward
    kind.forward = lambda self, hidden: stock(self, hidden) * 1.2
    try:
        yield
    finally:
        kind.forward = stock


@contextmanager
def _training(model: Any, draw: random.Random) -> Iterator[None]:
    """In train mode, with dropout; sometimes one module alone."""
    module = draw.choice([model, model, model.model.layers[0].self_attn])
    module.train()
    try:
        yield
    finally:
        model.eval()


@contextmanager
def _autocast(model: Any, draw: random.Random) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def _nothing(model: Any, draw: random.Random) -> Iterator[None]:
    yield


@contextmanager
def _gradients(model: Any, draw: random.Random) -> Iterator[None]:
    model.requires_grad_(False)
    yield


CHANGES: dict[str, Change] = {
    **LASTING,
    "a hook": _hook,
    "a hook before a layer": _pre_hook,
    "a hook on all modules": _global_hook,
    "forward of a class": _class_patched,
    "train mode": _training,
    "autocast": _autocast,
}
PREPARED: dict[str, Callable[[Any, random.Random], None]] = (
    dict.fromkeys(  # what the model is before it serves and changes
        ("another adapter", "an adapter switched off", "a stronger adapter", "a trained adapter"), _with_adapters
    )
)
SAME: dict[str, Change] = {"nothing": _nothing, "requires_grad": _gradients}  # what is stored stays valid


PREFIX, QUESTION = [1, 17, 23, 5], [90, 14, 33, 71, 8]
RANDOM = ("train mode", "autocast")  # whose logits are not those of a plain forward
NEAR = 2e-4
REQUESTS = 0.25  # of the changes: their whole requests take three times as long


class Changes(FaultClass):
    """Store, change, add and ask, some of it through a whole request; then ask with the original."""

    share = 0.008

    def setup(self) -> None:
        self._original = self.world.model
        self._chunks = [self.world.chunks[place][:16] for place in (0, 2)]
        self._truths = [stock_kv(self._original, SINK, ids) for ids in self._chunks]

    def inject(self, count: int) -> None:
        for _ in range(count):
            kind = self.random.choice([*CHANGES, *SAME])
            in_request = self.random.random() < REQUESTS
            self.outcome.paths["request" if in_request else "add and get"] += 1
            torch.manual_seed(self.random.randrange(1 << 30))
            self.judge(kind, lambda: self._one(kind, in_request), may_refuse=kind in CHANGES)  # noqa: B023
            shutil.rmtree(self.folder, ignore_errors=True)
            gc.collect()

    def _one(self, kind: str, in_request: bool) -> Verdict:
        """The verdict is that of the changed model, unless the original, or the model once more itself, is harmed."""
        original, truths, draw = self._original, self._truths, random.Random(self.random.random())
        if kind in PREPARED:
            original = copy.deepcopy(original)
            PREPARED[kind](original, draw)
            truths = [stock_kv(original, SINK, ids) for ids in self._chunks]
        model = copy.deepcopy(original)
        settings: dict[str, Any] = {"secret": self.random.choice((None, SECRET)), "durability": "none"}
        with ChunkStore.open(self.folder, memory_bytes=self.random.choice((0, 1 << 26)), **settings) as store:
            before = store.add(model, None, self._chunks[:1], chunk_prefix_ids=SINK)
            if in_request:
                self._request(model, store, self._chunks[:1])
            refusal: HfBlendError | None = None
            try:
                with {**CHANGES, **SAME}[kind](model, draw):
                    verdict = self._changed(kind, model, store, before, in_request)
            except HfBlendError as error:
                verdict, refusal = Verdict.REFUSED, error
        with ChunkStore.open(self.folder, memory_bytes=0, **settings) as fresh:
            if not self._is_true(original, fresh, truths):
                return Verdict.WRONG
            if kind not in LASTING and not self._is_true(model, fresh):
                return Verdict.WRONG
        if refusal is not None:
            raise refusal
        return verdict

    def _changed(
        self, kind: str, model: Any, store: ChunkStore, before: Sequence[ChunkKey], in_request: bool
    ) -> Verdict:
        """The same request again, then the same chunks and one more."""
        if in_request and not self._request(model, store, self._chunks, compared=kind not in RANDOM):
            return Verdict.WRONG
        if not self._is_true(model, store):
            return Verdict.WRONG
        return (
            Verdict.RIGHT
            if store.add(model, None, self._chunks[:1], chunk_prefix_ids=SINK) == before
            else Verdict.MISS
        )

    def _is_true(self, model: Any, store: ChunkStore, truths: Sequence[Truth] | None = None) -> bool:
        """Whether what a store has for a model is what the model computes."""
        keys = store.add(model, None, self._chunks, chunk_prefix_ids=SINK)
        truths = truths or [stock_kv(model, SINK, ids) for ids in self._chunks]
        for key, truth in zip(keys, truths, strict=True):
            got = store.get(key)
            pairs = [] if got is None else zip(got.layers, truth.layers, strict=True)
            if not all(is_near(one, other) for mine, theirs in pairs for one, other in zip(mine, theirs, strict=True)):
                return False
        return True

    def _request(
        self, model: Any, store: ChunkStore, chunks: Sequence[tuple[int, ...]], *, compared: bool = True
    ) -> bool:
        """Whether a request at ratio 1.0 gives the logits of a plain forward."""
        cache = BlendCache(model, store, recompute_ratio=1.0)
        inputs = cache.inputs(None, prefix=PREFIX, chunks=[*map(list, chunks)], question=QUESTION)
        cache.get_seq_length()
        with torch.no_grad():
            got = model(**inputs, past_key_values=cache, use_cache=True).logits[0, -1:]
        return not compared or is_near(got, stock_logits(model, inputs["input_ids"]), NEAR)
