# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documents, drawn from the committed results or from nothing but an idea."""

from collections.abc import Callable
from html import escape
from pathlib import Path

from svg import INK, THEMED, Line, line_chart, page
from tables import LOOKING, MEASURED, MODELS, REUSE, load_result, robust_rows

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
STORED = "#93c5fd"
COMPUTED = "#fb923c"
EXACT = "#c7d2fe"
PALE = "#f1f5f9"
PIECES = (("prefix", 70), ("chunk A", 150), ("chunk B", 150), ("chunk C", 150), ("question", 90))
LEFT = 130
TAKEN = {1: (14, 96), 2: (4, 60, 128), 3: (30, 84)}  # by piece, where recomputed tokens stand in it


def prompt() -> str:
    """One prompt three times: what each way computes, and what it takes from the store."""
    ways = [
        ("full prefill", [COMPUTED] * 5, {}),
        ("full reuse", [EXACT, EXACT, STORED, STORED, COMPUTED], {}),
        ("blend", [EXACT, EXACT, STORED, STORED, COMPUTED], {piece: TAKEN[piece] for piece in (2, 3)}),
    ]
    parts = [_row(place, *way) for place, way in enumerate(ways)]
    legend = [(COMPUTED, "computed now"), (STORED, "stored KV, keys moved to here"), (EXACT, "stored and exact")]
    parts += [_key(LEFT + (0, 150, 400)[place], 192, *entry) for place, entry in enumerate(legend)]
    return page(780, 212, "".join(parts), "what full prefill, full reuse and blending compute", THEMED)


def layers() -> str:
    """Which tokens are computed in which layer, by the rule that compares K and V."""
    rows = [
        ("layer 0", "all tokens: its K and V do not depend on other tokens", 24),
        ("layer 1", "K and V of all, compared with the stored ones: the furthest off are chosen", 24),
        ("layer 2", "only the chosen tokens and the question", 6),
        ("…", "everything else has its stored K and V, moved to its place", 6),
        ("last layer", "the question looks at all of it, and the answer begins", 6),
    ]
    parts = []
    for place, (name, said, count) in enumerate(rows):
        y = 12 + place * 46
        parts.append(_text(LEFT - 60, y + 15, name, "end"))
        parts += [_box(LEFT - 50 + column * 15, y, 12, 20, _colour(column, count)) for column in range(28)]
        parts.append(_text(LEFT - 50, y + 34, said, "start", 11))
    return page(540, 250, "".join(parts), "which tokens are computed in which layer", THEMED)


def speed() -> str:
    """How much earlier the first token comes, as a share of the time of a full prefill."""
    document = load_result("ttft")
    full = document["full"]["ttft_ms"]
    rows = sorted(document["rows"], key=lambda row: row["charged_budget"])
    measured = tuple((row["charged_budget"], row["ttft_ms"] / full) for row in rows)
    bound = tuple((row["charged_budget"], 1 / row["flop_bound"]) for row in rows)
    lines = [Line("measured", measured), Line("what the saved FLOPs allow", bound)]
    tokens = f"{rows[0]['prompt_tokens']} tokens, shape of {document['machine']['shape']}"
    return line_chart(lines, x_label=f"charged ({tokens})", y_label="first token, of full prefill", background=THEMED)


def gain() -> str:
    """What reuse and a rule leave of the error, and when their first token comes: two bars for each model."""
    found = {key: rows for key, rows in robust_rows(load_result("robust")).items() if key[1] == "hotpotqa"}
    parts = []
    y = 40
    for (model, _), rows in found.items():
        parts.append(f'<text x="10" y="{y + 14}" font-weight="bold">{MODELS[model]}</text>')
        for place, (name, key) in enumerate((("reuse", REUSE), (LOOKING, MEASURED))):
            row = rows[key]
            top = y + 22 + 26 * place
            width = max(2, round(330 * row["kl"]))
            said = f"{row['kl']:.2f} of the error, first token {row['ttft_x']:.1f} x as fast"
            parts += [
                f'<text x="80" y="{top + 14}" text-anchor="end">{name}</text>',
                f'<rect x="90" y="{top}" width="{width}" height="18" rx="3" class="bar{place}"/>',
                f'<text x="{98 + width}" y="{top + 14}">{said}</text>',
            ]
        y += 84
    counts = [rows[REUSE]["n"] for rows in found.values()]
    title = f"What is left of the error, and the first token ({min(counts)} to {max(counts)} prompts each of HotpotQA)"
    colours = ".bar0{fill:#94a3b8}.bar1{fill:#2563eb}text{fill:#1f2937}"
    dark = ".bar0{fill:#64748b}.bar1{fill:#60a5fa}text{fill:#e5e7eb}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {y}" width="100%" role="img" '
        f'style="max-width:720px" font-family="system-ui,sans-serif" font-size="13"><title>{title}</title>'
        f"<style>{colours}@media (prefers-color-scheme:dark){{{dark}}}</style>"
        f'<text x="10" y="18" font-weight="bold">{title}</text>{"".join(parts)}</svg>'
    )


def healing() -> str:
    """The error of the second and third turn against the share that was healed, of what it is without healing."""
    lines = list[Line]()
    rows = load_result("healing")["rows"]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {float(row["method"].split()[1]): row["kl"] for row in rows
               if row["model"] == model and row["method"].startswith("default")}  # fmt: skip
        for turn, name in ((1, "second"), (2, "third")):
            points = tuple((share, kl[turn] / own[0.0][turn]) for share, kl in sorted(own.items()))
            lines.append(Line(f"{model}, {name} turn", points))
    return line_chart(lines, x_label="healed after each turn", y_label="KL, of a turn never healed", background=THEMED)


PICTURES: dict[str, Callable[[], str]] = {
    "healing": healing,
    "prompt": prompt, "layers": layers, "speed": speed, "gain": gain,
    "quality": gain,  # beside the page of the demo
}  # fmt: skip


def path_of(name: str) -> Path:
    """The file of a picture: in the documents, or beside the page that shows it."""
    return (ROOT / "evaluation" / "demo" if name == "quality" else FOLDER) / f"{name}.svg"


def main() -> None:
    """Write all pictures into docs/pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        path_of(name).write_text(f"{draw()}\n", encoding="utf-8")


def _row(place: int, name: str, colours: list[str], taken: dict[int, tuple[int, ...]]) -> str:
    y = 14 + place * 56
    x = LEFT
    parts = [_text(LEFT - 12, 14 + place * 56 + 24, name, "end", 14)]
    for piece, ((said, width), colour) in enumerate(zip(PIECES, colours, strict=True)):
        parts.append(_box(x, y, width - 4, 38, colour))
        parts += [_box(x + offset, y, 12, 38, COMPUTED) for offset in taken.get(piece, ())]
        parts.append(_text(x + width / 2, y + 24, said, "middle", fill=INK))
        x += width
    return "".join(parts)


def _colour(column: int, count: int) -> str:
    is_question = column >= 24
    return COMPUTED if is_question or count == 24 or column in (3, 9, 16) else STORED


def _key(x: int, y: int, colour: str, said: str) -> str:
    return _box(x, y - 12, 16, 16, colour) + _text(x + 24, y + 1, said, "start", 12)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 13, fill: str = "currentColor") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
