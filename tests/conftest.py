# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every test may use: tiny random models, and the promise that a model is left as it was found."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_EVALUATE_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


@pytest.fixture(autouse=True, scope="session")
def two_threads() -> None:
    """Use the same number of threads everywhere, so that timings and sums do not depend on the machine."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


def build_tiny_model(
    model_type: str = "llama", *, seed: int = 0, weight_scale: float = 6.0, **config: Any
) -> PreTrainedModel:
    """Build a random model that is small but not trivial.

    Args:
        model_type: a name that `AutoConfig` knows.
        seed: of the weights.
        weight_scale: factor on every weight matrix; at 1 the attention would be nearly uniform.
        config: fields over those of `TINY`.

    Returns:
        A float32 model in eval mode, on the CPU.
    """
    settings = AutoConfig.for_model(model_type, **{**TINY, **config})
    random_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    torch.random.set_rng_state(random_state)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(weight_scale)
    return model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Give `build_tiny_model`: `tiny_model("qwen2", num_hidden_layers=2)` is a fresh model at each call."""
    return build_tiny_model


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Record all of a model that a library could leave behind: attributes, hooks, classes, config, weights, logits."""
    modules = dict(model.named_modules(remove_duplicate=False))
    prompt = torch.arange(3, 19)[None] % model.get_input_embeddings().num_embeddings
    with torch.no_grad():
        logits = model(prompt, use_cache=False).logits
    return {
        "classes": {name: type(module) for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "hooks": {name: [list(getattr(module, kind)) for kind in HOOKS] for name, module in modules.items()},
        "training": {name: module.training for name, module in modules.items()},
        "attention": model.config._attn_implementation,
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()) if model.can_generate() else None,
        "weights": {name: (id(weight), weight._version) for name, weight in model.named_parameters()},
        "logits": logits,
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Fail at the first thing that differs between two snapshots, and say which."""
    for part, was in before.items():
        now = after[part]
        if isinstance(was, torch.Tensor):
            difference = (was - now).abs()
            assert torch.equal(was, now), f"{part} moved: max {difference.max():.3g}, mean {difference.mean():.3g}"
        elif isinstance(was, dict):
            changed = {key: (was.get(key), now.get(key)) for key in was.keys() | now.keys()}
            changed = {key: pair for key, pair in changed.items() if pair[0] != pair[1]}
            assert not changed, f"{part} changed: {changed}"
        else:
            assert was == now, f"{part} changed: {was!r} → {now!r}"


@contextmanager
def leaves_untouched(model: PreTrainedModel) -> Iterator[None]:
    """Check that what happens inside, even if it raises, leaves the model as it was.

    Args:
        model: on any device; one short forward is run before and one after.
    """
    before = snapshot(model)
    try:
        yield
    finally:
        assert_same(before, snapshot(model))


@pytest.fixture(scope="session")
def untouched() -> Callable[[PreTrainedModel], Any]:
    """Give `leaves_untouched`, a context manager: whatever happens inside may not change the model."""
    return leaves_untouched
