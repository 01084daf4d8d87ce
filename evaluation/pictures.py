# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Messages with images: they are decoded, within bounds, and become a prompt by the model's own processor.

Nothing is fetched. What an image becomes is bounded by its size before the processor runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_blend.errors import PromptError
from hf_blend.model.modality import placeholder_ids
from hf_blend.prompt.text import build_text
from hf_blend.serving.pictures import opened_images, unreadable
from hf_blend.serving.prompts import MARK, PicturePrompt, is_picture, parts_of
from hf_blend.serving.wire import Limits

VALUE_BYTES = 12  # of a pixel, as processors compute: three colours in float32


class Eyes:
    """What a server makes prompts with images with: the model's processor, within limits."""

    def __init__(self, processor: Any, config: Any, limits: Limits) -> None:
        """No chunk of text may hold a placeholder of the model's config."""
        self.processor, self._placeholders, self._limits = processor, placeholder_ids(config), limits

    def take(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
        """The messages with contents in parts, as chat templates read them, and the images in them, decoded."""
        images, left = list[Any](), self._limits.image_bytes
        for what, image in opened_images(messages, self._limits):
            left -= VALUE_BYTES * self._resized(image, what)
            if left < 0:
                raise PromptError(
                    f"{what} has {image.width} x {image.height} pixels, of which the processor makes more than the "
                    f"{self._limits.image_bytes} bytes that are taken for a request. Send fewer, or one nearer to a "
                    "square."
                )
            images.append(_decoded(image, what))
        marked = [[MARK if is_picture(part) else part for part in parts_of(message)] for message in messages]
        return [{**row, "content": parts} for row, parts in zip(messages, marked, strict=True)], images

    def _resized(self, image: Any, what: str) -> int:
        try:
            return resized_pixels(getattr(self.processor, "image_processor", None), *image.size)
        except Exception as error:  # of the processor, which raises what it likes
            raise unreadable(what, error) from error

    def prompt(self, text: str, images: Sequence[Any], documents: Sequence[str], most: int | None) -> PicturePrompt:
        """A prompt of what the chat template made, with documents between the images."""
        try:
            made = self.processor(
                text=[text], images=list(images), add_special_tokens=False, return_tensors="pt",
                return_text_replacement_offsets=True,
            )  # fmt: skip
            (rows,) = made.pop("text_replacement_offsets")
        except Exception as error:  # of the processor, which raises what it likes
            raise PromptError(
                f"the processor refused {len(images)} images ({error!r:.200}), expected as many as its chat template "
                "has places for. Send others, or fewer."
            ) from error
        pieces, end = list[str](), 0
        for row in rows:
            pieces += [text[end : row["span"][0]], row["replacement"]]
            end = row["span"][1]
        prompt = build_text(
            self.processor.tokenizer, "".join([*pieces, text[end:]]), documents, special=False, most=most
        )
        if [*prompt.ids] != made["input_ids"][0].tolist():
            raise PromptError(
                f"{type(self.processor).__name__} makes other tokens of the prompt than its tokenizer, expected the "
                "same. Send it without images."
            )
        arguments = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
        size = sum(value.nbytes for value in arguments.values())
        if size > self._limits.image_bytes:
            raise PromptError(
                f"the processor made {size} bytes of {len(images)} images, expected at most "
                f"{self._limits.image_bytes}. Send fewer, or smaller ones."
            )
        spans = tuple(span for span in prompt.known if self._placeholders.isdisjoint(span.token_ids))
        opening = prompt.opening if self._placeholders.isdisjoint(prompt.ids[: prompt.opening]) else 0
        return PicturePrompt(prompt.ids, spans, opening, arguments=arguments)


def resized_pixels(processor: Any, width: int, height: int) -> int:
    """How many pixels an image processor makes of an image on its way, by what it is set to.

    Where it counts patches, these are what it makes. Else its `shortest_edge` is one: a strip is made as long as it is
    narrow. Of a grid of tiles the best is taken, as by the processor, and the whole image beside it.
    """
    size, (short, long) = getattr(processor, "size", None) or {}, sorted((width, height))
    square, shortest = (size.get("height") or 0) * (size.get("width") or 0), size.get("shortest_edge")
    count, grids = (getattr(processor, name, None) for name in ("get_number_of_image_patches", "image_grid_pinpoints"))
    if count is not None:
        patches, tile = count(height, width, {}), getattr(processor, "max_image_size", None)
        side: Any = getattr(tile, "get", lambda name: tile)("longest_edge") or getattr(processor, "patch_size", 1)
        frames = getattr(processor, "temporal_patch_size", 1)
        return int((patches[0] if isinstance(patches, tuple) else patches) * (square or side**2) * frames)
    pixels = square or short * long
    if shortest:
        resized = shortest * long // short
        pixels = shortest * min(resized, size.get("longest_edge") or resized)
    if grids:
        from transformers.image_processing_utils import select_best_resolution

        rows, columns = select_best_resolution((height, width), grids)
        pixels += rows * columns + (shortest or 0) ** 2
    return int(pixels)


def _decoded(image: Any, what: str) -> Any:
    """An image in RGB, upright."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # of a decoder, which raises what it likes
        raise unreadable(what, error) from error
