# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documents, drawn from the committed results or from nothing but an idea."""

from collections.abc import Callable
from html import escape
from pathlib import Path

from svg import INK, THEMED, Line, line_chart, page
from tables import LONG, LONG_DEFAULT, LONG_FAST, LONG_REUSE, MODELS, TASKS, largest_rows, load_result

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
STORED = "#93c5fd"
COMPUTED = "#fb923c"
EXACT = "#c7d2fe"
BAR = "#94a3b8"
NARROW = 440  # two pictures of this width are beside each other in README
PIECES = (("prefix", 50), ("chunk A", 106), ("chunk B", 106), ("chunk C", 106), ("question", 70))
CHOSEN = {2: (8, 46, 80), 3: (18, 60)}  # by piece, where recomputed tokens are in it
# of the picture of layers: how much each token of the chunks counts, and how many of them are chosen
SCORES = (3, 9, 12, 5, 2, 4, 2, 3, 11, 14, 6, 2, 3, 2, 5, 3, 10, 16, 7, 3, 2, 12, 4, 3)
CHOSEN_TOKENS = 7
QUESTION_TOKENS = 4
LABELS = 70  # where the names of layers end
GAIN = (LONG_DEFAULT, LONG_FAST, LONG_REUSE)
ERROR_AT = 120  # where bars begin
TIME_AT = 286
BAR_WIDTH = 145


def prompt() -> str:
    """One prompt three times: what each way computes, and what it takes from the store."""
    ways = [
        ("full prefill: every token is computed", [COMPUTED] * 5, {}),
        ("full reuse: stored K and V as they are", [EXACT, EXACT, STORED, STORED, COMPUTED], {}),
        ("blend: the tokens that matter most are computed again", [EXACT, EXACT, STORED, STORED, COMPUTED], CHOSEN),
    ]
    parts = [_row(place, *way) for place, way in enumerate(ways)]
    legend = [(COMPUTED, "computed now"), (STORED, "stored, keys moved"), (EXACT, "stored, exact")]
    parts += [_key((2, 132, 296)[place], 218, *entry) for place, entry in enumerate(legend)]
    return page(NARROW, 236, "".join(parts), "what full prefill, full reuse and blending compute", THEMED)


def layers() -> str:
    """Which tokens are computed in which layer, by the default rule."""
    chosen = sorted(range(len(SCORES)), key=lambda column: -SCORES[column])[:CHOSEN_TOKENS]
    parts = [_text(LABELS, 33, "before", "end"), _text(LABELS + 370, 33, "question")]
    for column, score in enumerate(SCORES):
        colour = COMPUTED if column in chosen else STORED
        parts.append(_box(LABELS + 10 + 15 * column, 36 - 1.5 * score, 12, 1.5 * score, colour))
    parts.append(_text(LABELS + 10, 52, "what was stored with each chunk says how much each token counts"))
    rows = [
        ("layer 0", "the tokens that count most, and the question"),
        ("layer 1", "the same; all others have their stored K and V, moved to here"),
        ("…", ""),
        ("last layer", "the question attends to all of it, and the answer begins"),
    ]
    y = 66
    for name, said in rows:
        parts.append(_text(LABELS, y + 15, name, "end"))
        for column in range(len(SCORES) + QUESTION_TOKENS):
            is_computed = column in chosen or column >= len(SCORES)
            parts.append(_box(LABELS + 10 + 15 * column, y, 12, 20, COMPUTED if is_computed else STORED))
        parts.append(_text(LABELS + 10, y + 35, said))
        y += 46 if said else 30
    return page(540, y, "".join(parts), "which tokens are computed in which layer, by the default rule", THEMED)


def speed() -> str:
    """How much earlier the first token comes, as a share of the time of a full prefill."""
    document = load_result("ttft")
    full = document["full"]["ttft_ms"]
    rows = sorted(document["rows"], key=lambda row: row["charged_budget"])
    measured = tuple((row["charged_budget"], row["ttft_ms"] / full) for row in rows)
    bound = tuple((row["charged_budget"], 1 / row["flop_bound"]) for row in rows)
    lines = [Line("measured", measured), Line("if only FLOPs counted", bound)]
    tokens = f"{rows[0]['prompt_tokens']} tokens, shape of {document['machine']['shape']}"
    said = "time to the first token, of full prefill"
    return line_chart(lines, x_label=f"cost ({tokens})", y_label=said, background=THEMED)


def gain() -> str:
    """What is left of the error and of the time to the first token: bars beside each other, a block for each task."""
    found = largest_rows(load_result("regime"))
    model, _, chunks = next(iter(found))
    worst = max(rows[method]["of_reuse"] for rows in found.values() for method in GAIN)
    parts = [
        _text(2, 16, f"{MODELS[model]}, {chunks} chunks of 540 tokens; shorter is better", size=13),
        _text(ERROR_AT, 36, "error (1: full reuse)"),
        _text(TIME_AT, 36, "time to the first token"),
    ]
    y = 44
    for (_, task, _), rows in found.items():
        parts.append(_text(2, y + 14, f"{TASKS[task]}, {rows[LONG_REUSE]['n']} prompts", size=13))
        y += 20
        for method, name in {"full": "full prefill", **{method: LONG[method] for method in GAIN}}.items():
            error = rows[method]["of_reuse"] if method in rows else 0.0
            faster = rows[method]["ttft_x"] if method in rows else 1.0
            colour = COMPUTED if method == LONG_DEFAULT else BAR
            parts.append(_text(ERROR_AT - 6, y + 12, name, "end"))
            parts.append(_bar(ERROR_AT, y, error / worst, colour, f"{error:.2f}" if error else "0"))
            parts.append(_bar(TIME_AT, y, 1 / faster, colour, f"{faster:.1f} x as fast" if faster > 1 else "1"))
            y += 19
        y += 6
    return page(NARROW, y, "".join(parts), "error and first token beside full prefill", THEMED)


def _bar(x: float, y: float, share: float, colour: str, said: str) -> str:
    """A bar and what it says: behind it, or on it where it is long."""
    width = max(1.5, round(share * BAR_WIDTH, 1))
    if share > 0.7:
        return _box(x, y, width, 15, colour) + _text(x + width - 5, y + 12, said, "end", fill=INK)
    return _box(x, y, width, 15, colour) + _text(x + width + 5, y + 12, said)


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


def _row(place: int, name: str, colours: list[str], chosen: dict[int, tuple[int, ...]]) -> str:
    y = 22 + place * 64
    x = 2
    parts = [_text(2, y - 6, name, size=13)]
    for piece, ((said, width), colour) in enumerate(zip(PIECES, colours, strict=True)):
        parts.append(_box(x, y, width - 3, 34, colour))
        parts += [_box(x + offset, y, 10, 34, COMPUTED) for offset in chosen.get(piece, ())]
        parts.append(_text(x + (width - 3) / 2, y + 22, said, "middle", 13, INK))
        x += width
    return "".join(parts)


def _key(x: int, y: int, colour: str, said: str) -> str:
    return _box(x, y - 12, 16, 16, colour) + _text(x + 22, y + 1, said)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12, fill: str = "currentColor") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
