# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text: the pictures in docs, light and dark as the reader prefers, and the chart on the demo's page.

Text takes the colour of the page it stands in (`currentColor`), unless a background is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#64748b")
DASHES = ("", "8 4", "2 4", "12 4 2 4")  # of lines that share a colour
WIDTH = 720
HEIGHT = 380
LEFT = 64  # margins, in pixels
RIGHT = 28
TOP = 16
BOTTOM = 92
IN_A_ROW = 2  # names of lines below the chart
INK = "#1f2937"
THEMED = "themed"  # a background that is white or dark, as the reader prefers
DARK = "@media (prefers-color-scheme:dark){.ground{fill:#0d1117}.ink{color:#e5e7eb}}"


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    bars: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Frame:
    """From values to pixels; both axes begin at 0 and end at `most_x` and `most_y`."""

    most_x: float = 1.0
    most_y: float = 1.0

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return round(LEFT + value / self.most_x * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return round(HEIGHT - BOTTOM - value / self.most_y * (HEIGHT - TOP - BOTTOM), 1)


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    most_x: float = 1.0,
    most_y: float = 1.0,
    unit: str = "%",
    background: str | None = None,
) -> str:
    """Draw lines over shares or amounts, from 0 on."""
    frame = Frame(most_x, most_y)
    parts = [_axes(frame, x_label, y_label, unit)]
    for place, line in enumerate(lines):
        parts += [_line(frame, line, place), _legend(line, place)]
    height = HEIGHT + 18 * max(0, (len(lines) - 1) // IN_A_ROW - 1)
    return page(WIDTH, height, "".join(parts), f"{y_label} against {x_label}", background)


def page(width: float, height: float, content: str, title: str, background: str | None) -> str:
    """Put content into an `<svg>` element that shrinks with its place."""
    behind = f'<rect width="{width}" height="{height}" fill="{background}"/>' if background else ""
    ink = f' color="{INK}"' if background else ""
    if background == THEMED:
        behind = f'<style>{DARK}</style><rect width="{width}" height="{height}" fill="#ffffff" class="ground"/>'
        ink += ' class="ink"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="100%" role="img"{ink} '
        f'style="max-width:{width}px" font-family="system-ui,sans-serif" font-size="13">'
        f"<title>{escape(title)}</title>{behind}{content}</svg>"
    )


def _axes(frame: Frame, x_label: str, y_label: str, unit: str) -> str:
    parts = []
    factor = 100 if unit == "%" else 1
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = frame.y(share * frame.most_y)
        x = frame.x(share * frame.most_x)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="currentColor" opacity="0.2"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{share * frame.most_y:.3f}".removesuffix("0"), "end"))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{factor * share * frame.most_x:g} {unit}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 38, x_label, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="16" y="{middle}" fill="currentColor" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        f"{escape(y_label)}</text>"
    )
    return "".join(parts)


def _line(frame: Frame, line: Line, place: int) -> str:
    colour = COLOURS[place % len(COLOURS)]
    places = [(frame.x(x), frame.y(y)) for x, y in line.points]
    path = "M" + "L".join(f"{x} {y}" for x, y in places)
    parts = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{_dash(line, place)}/>']
    parts += [f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>' for x, y in places]
    for (x, _), (low, high) in zip(places, line.bars, strict=False):
        parts.append(f'<path d="M{x} {frame.y(low)}V{frame.y(high)}" stroke="{colour}" opacity="0.6"/>')
    return "".join(parts)


def _legend(line: Line, place: int) -> str:
    x = LEFT + (place % IN_A_ROW) * (WIDTH - LEFT - RIGHT) // IN_A_ROW
    y = HEIGHT - 26 + (place // IN_A_ROW) * 18
    colour = COLOURS[place % len(COLOURS)]
    mark = f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="3"{_dash(line, place)}/>'
    return mark + _text(x + 30, y, line.name, "start")


def _dash(line: Line, place: int) -> str:
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="currentColor" text-anchor="{anchor}">{escape(text)}</text>'
