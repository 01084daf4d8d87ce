# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Messages with images: `data:` URLs are decoded, within bounds, and become a prompt by the model's own processor.

Nothing is fetched. What is decoded is one of three formats, and its size is known before its pixels are.
"""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hf_blend.errors import PromptError
from hf_blend.model.modality import placeholder_ids
from hf_blend.prompt.text import build_text
from hf_blend.serving.prompts import MARK, PicturePrompt, is_picture, parts_of
from hf_blend.serving.wire import Limits, check_count

FORMATS = ("PNG", "JPEG", "WEBP")
URL = re.compile(r"data:image/[a-z+.-]{1,20};base64,")


class Eyes:
    """What a server makes prompts with images with: the model's processor, within limits."""

    def __init__(self, processor: Any, config: Any, limits: Limits) -> None:
        """No chunk of text may hold a placeholder of the model's config."""
        self.processor, self._placeholders, self._limits = processor, placeholder_ids(config), limits

    def take(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
        """The messages with contents in parts, as chat templates read them, and the images in them, decoded."""
        urls = [(at, part) for at, message in enumerate(messages) for part in parts_of(message) if is_picture(part)]
        check_count("images", len(urls), self._limits.images)
        found, left = list[Any](), self._limits.pixels
        for at, part in urls:
            found.append(_decoded(part, f"the image in messages.{at}", left))
            left -= found[-1].width * found[-1].height
        marked = [[MARK if is_picture(part) else part for part in parts_of(message)] for message in messages]
        return [{**row, "content": parts} for row, parts in zip(messages, marked, strict=True)], found

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
        known = build_text(
            self.processor.tokenizer, "".join([*pieces, text[end:]]), documents, special=False, most=most
        )
        if [*known.ids] != made["input_ids"][0].tolist():
            raise PromptError(
                f"{type(self.processor).__name__} makes other tokens of the prompt than its tokenizer, expected the "
                "same. Send it without images."
            )
        given = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
        size = sum(value.nbytes for value in given.values())
        if size > self._limits.image_bytes:
            raise PromptError(
                f"the processor made {size} bytes of {len(images)} images, expected at most "
                f"{self._limits.image_bytes}. Send fewer, or smaller ones."
            )
        spans = tuple(span for span in known.known if self._placeholders.isdisjoint(span.token_ids))
        opening = known.opening if self._placeholders.isdisjoint(known.ids[: known.opening]) else 0
        return PicturePrompt(known.ids, spans, opening, arguments=given)


def _decoded(part: Mapping[str, Any], what: str, pixels: int) -> Any:
    """The image of a `data:` URL, in RGB, upright."""
    from PIL import Image, ImageOps

    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    start = URL.match(url) if isinstance(url, str) else None
    if not isinstance(url, str) or start is None:
        raise PromptError(
            f"{what} has the URL {url!r:.40}, expected data:image/png;base64,… Nothing is fetched: send the image as "
            "such."
        )
    try:
        image = Image.open(io.BytesIO(base64.b64decode(url[start.end() :], validate=True)), formats=FORMATS)
        size, is_film = image.size, image.format != "JPEG" and getattr(image, "is_animated", False)
        if size[0] * size[1] <= pixels and not is_film:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # of a decoder, which raises what it likes
        raise PromptError(
            f"{what} cannot be read ({type(error).__name__}), expected {', '.join(FORMATS)}. Send another."
        ) from error
    came = "several frames, expected one" if is_film else f"{size[0]} x {size[1]} pixels, expected at most {pixels}"
    raise PromptError(f"{what} has {came}{'' if is_film else ', which are left of a request'}. Send another.")
