# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random models of every causal type of transformers, as `tiny:TYPE` names them.

A tiny model is built from the config class of its type: sizes are made small by the names that configs share, whatever
else the type sets is kept. So a type needs no code here, and one whose config does not shrink says why.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from hf_blend.errors import ConfigError, UnsupportedModelError, suggest
from hf_blend.model.anatomy import other_states

LAYERS = 4
WEIGHT_SCALE = 3.0  # at 1 attention is nearly uniform, and much that is wrong would not show
SPREAD = 0.1  # of biases and norm weights, which are all 0 or all 1 in a fresh model
NOT_JUDGED = "not judged: "  # how it is said that there is no tiny model, so that nothing is known of a type
MOST_PARAMETERS = 20_000_000  # more means that the config did not shrink
SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
FIELDS: dict[str, Any] = SIZES["fields"]  # by the names that configs share
EXTRA: dict[str, dict[str, Any]] = SIZES["types"]  # what a type asks for beyond these
MIXERS = ("linear_attention", "conv")  # kinds of layers with a mixer
WRONG_CONFIG = (
    ArithmeticError,
    AttributeError,
    AssertionError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def tiny_types() -> list[str]:
    """Every model type that transformers knows as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(model_type: str, *, seed: int = 0, **fields: Any) -> nn.Module:
    """Build a small random model of a type: 4 layers of width 64, with grouped heads where the type can have them."""
    if model_type not in tiny_types():
        near = suggest(model_type, tiny_types()).partition("Available")[0]
        raise ConfigError(
            f"transformers has no causal language model of type {model_type!r}. {near}Give the model_type of a "
            "config.json, such as tiny:llama."
        )
    refusal = refused_by_config(model_type)
    if refusal:
        raise UnsupportedModelError(refusal)
    failures: list[BaseException] = []
    for fill in (False, True):  # some types leave at None what they cannot do without, others mean None
        try:
            return _build(model_type, seed, fields, fill)
        except UnsupportedModelError:
            raise
        except WRONG_CONFIG as error:
            failures.append(error)
    raise UnsupportedModelError(
        f"{NOT_JUDGED}no tiny model of type {model_type!r} can be built: {type(failures[0]).__name__}: "
        f"{_short(failures[0])} Its config does not shrink by the common field names; verify a checkpoint instead."
    ) from failures[0]


def refused_by_config(model_type: str) -> str:
    """Why no model of a type can be blended, as far as its default config tells; empty if it does not."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(model_type).get_text_config(decoder=True)
    except WRONG_CONFIG:
        return ""
    if getattr(config, "is_encoder_decoder", False):
        return f"{model_type} models are encoder-decoders, but only decoders that read prompts themselves are blended."
    complaint = other_states(config)
    return f"{model_type} models cannot be blended: {complaint}" if complaint else ""


def _build(model_type: str, seed: int, fields: dict[str, Any], fill: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = _tiny_config(model_type, fields, fill)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise UnsupportedModelError(
            f"{NOT_JUDGED}no tiny model of type {model_type!r} can be built: it would have {count:,} parameters, at "
            f"most {MOST_PARAMETERS:,} are expected. Verify a checkpoint of it instead."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _roughen(model)
    with torch.no_grad():
        model(torch.arange(8, 16)[None])  # sizes that do not fit each other show here
    return model


@torch.no_grad()
def _roughen(model: nn.Module) -> None:
    """Make every weight matter: larger matrices, biases and norm weights that differ."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(WEIGHT_SCALE)
        else:
            weight.add_(SPREAD * torch.randn_like(weight))


def _tiny_config(model_type: str, fields: dict[str, Any], fill: bool) -> Any:
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    shrunk = _shrunk(default, fill)
    for name, value in EXTRA.get(model_type, {}).items():
        if isinstance(shrunk.get(name), dict):  # an inner config
            value = {**shrunk[name], **value}
        shrunk[name] = value
    return AutoConfig.for_model(model_type, **{**shrunk, **fields})


def _shrunk(default: Any, fill: bool) -> dict[str, Any]:
    """Small values for those fields that a config has, with `fill` those at None too; its inner configs likewise."""
    found: dict[str, Any] = {}
    for name, value in FIELDS.items():
        if name.endswith("token_id") or _has(default, name, fill):
            found[name] = value
    if _has(default, "num_key_value_heads", True):
        latent = _has(default, "kv_lora_rank", False)  # latent attention has as many as there are heads
        found["num_key_value_heads"] = FIELDS["num_attention_heads" if latent else "num_key_value_heads"]
    for name in getattr(default, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None:
            found[name] = _shrunk(inner, fill)
    kinds = _layer_kinds(default)
    own = getattr(default, "attribute_map", {}).get("layer_types", "layer_types")
    if 1 < len(kinds) <= LAYERS and not isinstance(getattr(type(default), own, None), property):
        found[own] = _layer_types(kinds)
    return found


def _has(config: Any, name: str, fill: bool) -> bool:
    if isinstance(getattr(type(config), name, None), property):
        return False
    try:
        return hasattr(config, name) if fill else getattr(config, name, None) is not None
    except RuntimeError:  # its layers differ in it
        return True


def _layer_kinds(config: Any) -> list[str]:
    """The kinds of layers that a config names, one by one or as those with rotary tables of their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = list(getattr(config, "layer_types", None) or ())
    if kinds:
        kinds += [name for name in rope if name.endswith("_attention")]
    return list(dict.fromkeys(kinds))


def _layer_types(kinds: Sequence[str]) -> list[str]:
    """Every kind of layer that the type has, in its order; the first kind fills up, and is also last if it mixes."""
    if kinds[0] in MIXERS and len(kinds) < LAYERS:
        return [kinds[0]] * (LAYERS - len(kinds)) + [*kinds[1:], kinds[0]]
    return [kinds[0]] * (LAYERS - len(kinds) + 1) + list(kinds[1:])


def _short(error: BaseException) -> str:
    line = " ".join(str(error).split())
    return line if len(line) <= 200 else f"{line[:200]}…"
