# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Images in messages: `data:` URLs of three formats, whose sizes are checked before any pixel is decoded."""

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import PromptError, import_extra
from .prompts import is_picture, parts_of
from .wire import Limits, check_count

__all__ = ["opened_images"]

FORMATS = ("PNG", "JPEG", "WEBP")
URL = re.compile(r"data:image/[a-z+.-]{1,20};base64,")


def opened_images(messages: Sequence[Mapping[str, Any]], limits: Limits) -> Iterator[tuple[str, Any]]:
    """Yield each image of messages with a name for errors; only the header of the image is decoded yet."""
    rows = [(at, item) for at, message in enumerate(messages) for item in parts_of(message) if is_picture(item)]
    check_count("images", len(rows), limits.images)
    left = limits.pixels
    for at, item in rows:
        what = f"the image in messages.{at}"
        image = _opened(item, what)
        _check_size(image, what, left, limits)
        left -= image.width * image.height
        yield what, image


def unreadable(what: str, error: Exception) -> PromptError:
    """Return the error for an image that a decoder refused."""
    return PromptError(f"{what} cannot be read ({type(error).__name__}), expected {', '.join(FORMATS)}. Send another.")


def _opened(item: Mapping[str, Any], what: str) -> Any:
    image_url = item.get("image_url")
    url = image_url.get("url") if isinstance(image_url, Mapping) else image_url
    start = URL.match(url) if isinstance(url, str) else None
    if not isinstance(url, str) or start is None:
        raise PromptError(
            f"{what} has the URL {url!r:.40}, expected data:image/png;base64,… Nothing is fetched: send the image as "
            "such."
        )
    pillow = import_extra("PIL.Image", extra="images", wanted_by="an image in a message")
    try:
        return pillow.open(io.BytesIO(base64.b64decode(url[start.end() :], validate=True)), formats=FORMATS)
    except Exception as error:  # of a decoder, which raises what it likes
        raise unreadable(what, error) from error


def _check_size(image: Any, what: str, pixels: int, limits: Limits) -> None:
    short, long = sorted(image.size)
    size = f"{image.width} x {image.height} pixels"
    if image.format != "JPEG" and getattr(image, "is_animated", False):
        raise PromptError(f"{what} has several frames, expected one. Send another.")
    if short * long > pixels:
        raise PromptError(f"{what} has {size}, expected at most {pixels}, which are left of a request. Send another.")
    if long > limits.aspect_ratio * short:
        raise PromptError(
            f"{what} has {size}, expected a longer side of at most {limits.aspect_ratio:g} times the shorter. Cut it."
        )
