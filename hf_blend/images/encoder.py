# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The vision tower of a model, one image at a time: what it is called with, and what it makes of it.

The door is transformers' own: `get_image_features` encodes, and `mm_encoder_outputs` hands what was encoded before to
`forward` and `generate`. Nothing here knows the name of a model. How the arguments of several images come apart, and
how their features are put together again, is judged by the model itself: at the first prompt of its kind all images
are encoded by one plain call too, and what differs is refused.
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import PromptError, UnsupportedModelError
from ..model.checks import LOGITS, allowed_of, norm_error
from ..model.identity.canonical import canonical, notes_kept

PIXELS = "pixel_values"
GRID = "image_grid_thw"  # rows of `pixel_values` are patches then, and not images
ENCODED = "mm_encoder_outputs"

Features = tuple[Tensor, ...]  # `[tokens, width]`: what goes to the embeddings, then what is added behind each layer


@dataclass(frozen=True)
class _Form:
    """How the outputs of a model's `get_image_features` look."""

    kind: type
    is_stacked: bool
    widths: tuple[int, ...]


_forms: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], _Form]] = WeakKeyDictionary()


def digest_of(image: Mapping[str, Any]) -> str:
    """A digest of the vision tower's inputs for one image: pixels, and whatever else a processor made."""
    state = hashlib.sha256()
    for name, value in sorted(image.items()):
        states = value.detach().cpu().contiguous()
        state.update(f"{name} {states.dtype} {tuple(states.shape)};".encode())
        state.update(states.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def cannot_encode_ahead(model_class: type[nn.Module], config: Any, has_tower: bool = True) -> str:
    """Why a model cannot take images that are encoded before its forward, in a sentence; empty if it can."""
    takes = inspect.signature(model_class.forward).parameters
    needs = {
        "get_image_features": has_tower,
        f"the argument {ENCODED} of its forward": ENCODED in takes,
        "image_token_id in its config": type(getattr(config, "image_token_id", None)) is int,
    }
    missing = next((what for what, is_there in needs.items() if not is_there), "")
    if not missing:
        return ""
    return (
        f"images cannot be chunks for {model_class.__name__}: it lacks {missing}, expected of a model whose images "
        "are encoded ahead (transformers 5.18 and newer). Pass the images to generate as they are: then they are "
        "computed in place."
    )


class ImageEncoder:
    """Encodes the images of a prompt with a model's own vision tower, each alone."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._form: _Form | None = None
        self._encode = getattr(getattr(model, "base_model", model), "get_image_features", None)
        complaint = cannot_encode_ahead(type(model), model.config, self._encode is not None)
        if complaint:
            raise UnsupportedModelError(complaint)
        self.token_id: int = model.config.image_token_id
        self.names = tuple(name for name in inspect.signature(self._encode).parameters if name != "kwargs")  # type: ignore[arg-type]

    def split(self, arguments: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Split the arguments of several images into those of each."""
        inputs = {name: arguments[name] for name in self.names if arguments.get(name) is not None}
        odd = [name for name, value in inputs.items() if not isinstance(value, Tensor)]
        if odd:
            raise PromptError(
                f"{odd[0]} is {type(inputs[odd[0]]).__name__}, expected a tensor as a processor makes it. Pass "
                "return_tensors='pt'."
            )
        pixels, grid = inputs[PIXELS], inputs.get(GRID)
        if grid is not None:
            return self._by_grid(inputs, pixels, grid)
        if pixels.dim() == 5 and "pixel_attention_mask" in self.names:  # [batch, images, …], padded with zeros
            real = pixels.flatten(0, 1).flatten(1).any(dim=1)
            flat = {name: value.flatten(0, 1)[real.to(value.device)] for name, value in inputs.items()}
            return [{name: value[None, at : at + 1] for name, value in flat.items()} for at in range(int(real.sum()))]
        return _rows(inputs, len(pixels))

    def _by_grid(self, inputs: dict[str, Tensor], pixels: Tensor, grid: Tensor) -> list[dict[str, Tensor]]:
        sizes = grid.prod(-1).tolist()
        if sum(sizes) != len(pixels):
            raise PromptError(
                f"{PIXELS} has {len(pixels)} patches, expected {sum(sizes)} by {GRID}. Pass both as the processor "
                "made them."
            )
        others = _rows({name: value for name, value in inputs.items() if name != PIXELS}, len(sizes))
        return [{**other, PIXELS: patches} for other, patches in zip(others, pixels.split(sizes), strict=True)]

    def encode(self, image: Mapping[str, Tensor]) -> Features:
        """Run the tower for one image."""
        return _features(self._model, self._run(image))

    def output(self, images: Sequence[Features]) -> Any:
        """What the model's forward takes for some encoded images, in the form that `judge` found."""
        form: Any = self._form
        device = self._model.device
        levels = [[tensor.to(device) for tensor in level] for level in zip(*images, strict=True)]
        pooled: Any = torch.stack(levels[0]) if form.is_stacked else levels[0]
        return form.kind(pooler_output=pooled, **({"deepstack_features": levels[1:]} if levels[1:] else {}))

    def judge(self, identity: str, arguments: Mapping[str, Any], images: Sequence[Features]) -> None:
        """Test, once for each kind of prompt, that images encoded alone give what the model makes of all together."""
        inputs = {name: arguments[name] for name in self.names if arguments.get(name) is not None}
        forms, kind = _forms.setdefault(self._model, {}), (identity, *sorted(inputs), len(images) > 1)
        if kind not in forms:
            output = self._run(inputs)
            if not _is_alike(_features(self._model, output), images):
                raise UnsupportedModelError(
                    f"images cannot be chunks for {type(self._model).__name__}: what it makes of {len(images)} images "
                    f"together is not what it makes of each alone, as is expected ({', '.join(inputs)}). Pass them to "
                    "generate as they are: then they are computed in place."
                )
            widths = tuple(level.shape[-1] for level in images[0])
            forms[kind] = _Form(type(output), isinstance(output.pooler_output, Tensor), widths)
        self._form = forms[kind]
        for image in images:
            if tuple(level.shape[-1] for level in image) != self._form.widths:
                raise UnsupportedModelError(
                    f"features of an image have the widths {[level.shape[-1] for level in image]}, but those of "
                    f"{type(self._model).__name__} are expected to have {[*self._form.widths]}. Encode it again."
                )

    @torch.no_grad()
    def _run(self, arguments: Mapping[str, Tensor]) -> Any:
        device = self._model.device
        with canonical(self._model), notes_kept(self._model):
            moved = {name: value.to(device) for name, value in arguments.items()}
            return self._encode(**moved, return_dict=True)  # type: ignore[misc]


def _rows(inputs: Mapping[str, Tensor], images: int) -> list[dict[str, Tensor]]:
    for name, value in inputs.items():
        if not value.dim() or len(value) != images:
            raise PromptError(
                f"{name} has shape {tuple(value.shape)}, expected a row for each of the {images} images, which are "
                "encoded one by one. Leave it out, or pass the images to generate as they are."
            )
    return [{name: value[at : at + 1] for name, value in inputs.items()} for at in range(images)]


def _is_alike(whole: Features, images: Sequence[Features]) -> bool:
    """Whether the features of images encoded alone are those of all encoded together, up to the dtype's noise."""
    if any(len(image) != len(whole) for image in images):
        return False
    for true, *levels in zip(whole, *images, strict=True):
        got = torch.cat([level.to(true.device) for level in levels])
        if not norm_error(got, true) <= allowed_of(LOGITS, true.dtype):
            return False
    return True


def _features(model: nn.Module, output: Any) -> Features:
    """The rows of an output, all images one behind the other."""
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    features = []
    for level in levels:
        tensors = [level] if isinstance(level, Tensor) else list(level)
        if not all(isinstance(tensor, Tensor) and tensor.dim() in (2, 3) for tensor in tensors):
            raise UnsupportedModelError(
                f"images cannot be chunks for {type(model).__name__}: its tower gives {type(level).__name__} of "
                f"{', '.join(type(item).__name__ for item in tensors)}, expected tensors [tokens, width]. Pass the "
                "images to generate as they are: then they are computed in place."
            )
        features.append(torch.cat([tensor.flatten(0, -2) for tensor in tensors]))
    return tuple(features)
