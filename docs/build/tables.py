# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of the README and of docs, written from the committed results, so that no number is typed.

python docs/build/tables.py
"""

import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_blend import plugins
from hf_blend.model_names import from_checkout

families = from_checkout("families")
EXACT = families.EXACT
judged = families.judged
ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
YES = "✓"
NO = "\N{EN DASH}"
UNJUDGED = "?"
# words of a reason, and what it means; the table gives the number
REASONS = (
    ("attends within a window", "a layer attends within a window of its own, so there are no far tokens to group"),
    ("keeps a state of another kind", "a layer keeps another state than K and V of each token"),
    ("layers in its decoder", "the decoder has not exactly one list of layers"),
    ("It has no rotary table", "positions are learned or added to the embeddings: K and V cannot be moved"),
    ("adds positions to the embeddings", "positions are learned or added to the embeddings: K and V cannot be moved"),
    ("without asking for it by", "attention is computed without transformers' AttentionInterface"),
    ("keeps a state of all tokens before", "a state of all tokens before does not come to the cache, or not by rows"),
    ("in the cache, but keys and values of the form", "what is left in the cache is no K and V of each token"),
    ("normalises its keys behind", "keys are normalised after their rotation"),
    ("as a norm behind the rotation", "keys are normalised after their rotation"),
    ("encoder-decoders", "an encoder-decoder, or an encoder"),
    ("an encoder", "an encoder-decoder, or an encoder"),
    ("one token comes at a time", "the code takes a block of tokens only where nothing is before it"),
    ("does not rotate its keys", "no layer rotates its keys, and rotary positions are what is grouped"),
    ("", "another; `hf-blend verify tiny:TYPE` says which"),
)
LEGEND = list(dict.fromkeys(meaning for _, meaning in REASONS))
# tables named otherwise than their result file
SOURCES = {
    "support": "families",
    "front": "regime",
    "rules": "robust",
}
LOOKING = "expected-error"  # the default when `robust.py` and `real_answers.py` ran
MEASURED = f"{LOOKING}@text", 0.15  # a method of `robust.py`, and the charge that was asked for
REUSE = ("none@text", 0.0)
MODELS = {  # of `robust.py` and `regime.py`, the smallest first
    "smollm2": "SmolLM2-135M",
    "gemma3": "Gemma 3 270M",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
}
TASKS = {"hotpotqa": "HotpotQA", "musique": "MuSiQue", "2wikimqa": "2WikiMultihop"}
LARGEST_FIRST = [*reversed(MODELS)]
LONG = {  # methods of `regime.py`, and what they are called
    "none=0": "full reuse",
    "random=0.15": "random tokens, 15 %",
    "kv-deviation=0.15": "`kv-deviation`, 15 %",
    "stored-importance=0.05": "default rule, 5 %",
    "stored-importance=0.15": "default rule, 15 %",
    "stored-importance=0.3": "default rule, 30 %",
}
LONG_REUSE = "none=0"
LONG_DEFAULT = "stored-importance=0.3"
LONG_FAST = "stored-importance=0.15"
FRONT = {  # rows of the README
    "none=0": "0 %, full reuse",
    "random=0.15": "15 %, at random",
    "kv-deviation=0.15": "15 %, CacheBlend's rule",
    "stored-importance=0.15": "15 %, default rule",
    "stored-importance=0.3": "**30 %, default rule**",
}
FRONT_CHUNKS = 6
ANSWERED = {  # rows of the table of answers: method of `real_answers.py`
    "full prefill": "full",
    "full reuse, after BOS alone": "none=0",
    "full reuse": "none@text=0",
    "`boundary`": "boundary@text=0.1",
    "`ramp`": "ramp@text=0.1",
    "`expected-error`": "expected-error@text=0.1",
}
PLACE = re.compile(r"<!--table:(?P<name>\w+)-->\n.*?<!--end-->", re.DOTALL)


def filled(text: str, results: Path) -> str:
    """Put every table in its place."""
    return PLACE.sub(lambda place: _table(place["name"], results), text)


def _table(name: str, results: Path) -> str:
    document = json.loads((results / f"{SOURCES.get(name, name)}.json").read_text("utf-8"))
    lines = [compact(line) for line in TABLES[name](document)]
    return "\n".join([f"<!--table:{name}-->", *lines, "<!--end-->"])


def compact(line: str) -> str:
    """A line of a table without the blanks beside its bars and before % and x; another line as it is."""
    return re.sub(r" *\| *|(?<=\d) (?=[%x]\W)", lambda found: found[0].strip(), line) if line[:1] == "|" else line


def load_result(name: str) -> dict[str, Any]:
    """Read a committed result."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
    return found


def first_task(document: dict[str, Any]) -> dict[tuple[str, float], dict[str, Any]]:
    """Give the rows of the first model and task of a comparison."""
    rows = [row for row in document["rows"] if row["half"] == "both"]
    names = [(row["model"], row["task"]) for row in rows]
    own = [row for row, name in zip(rows, names, strict=True) if name == names[0]]
    return {(row["selector"], row["target"]): row for row in own}


def _head(names: str, cells: Iterable[str]) -> list[str]:
    """The first two lines of a table: some names, and a cell for each column."""
    line = " | ".join([names, *cells])
    return [f"| {line} |", "|---" * (line.count(" | ") + 1) + "|"]


def _kl(row: dict[str, Any]) -> str:
    """A KL divergence with its interval."""
    return f"{row['kl']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def _of(name: str) -> str:
    """What a selector is called in a table."""
    return "full reuse" if name == "none" else f"`{name}`"


def _answers(document: dict[str, Any]) -> list[str]:
    """Right answers of real models to a question that they can answer."""
    models = {row["model"]: row["n"] for row in document["rows"]}
    by_method = {(row["model"], row["method"]): row for row in document["rows"]}
    titles = [f"{MODELS.get(model, model)}, n = {n}" for model, n in models.items()]
    lines = [f"| chunks, selector | cost | {' | '.join(titles)} |", "|---" * (2 + len(models)) + "|"]
    for name, method in ANSWERED.items():
        rows = [by_method.get((model, method)) for model in models]
        charged = next(row["charged"] for row in rows if row)
        shares = [(row["right"], row["right_low"], row["right_high"]) if row else None for row in rows]
        cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*share) if share else "" for share in shares]
        lines.append(f"| {name} | {100 * charged:.0f} % | {' | '.join(cells)} |")
    return lines


def robust_rows(document: dict[str, Any], chunks: int = 6) -> dict[tuple[str, str], dict[tuple[str, float], Row]]:
    """Give the rows of each model and task by method and charge; where `MEASURED` does worst comes first."""
    found: dict[tuple[str, str], dict[tuple[str, float], Row]] = {}
    for row in document["rows"]:
        if row["chunks"] == chunks:
            found.setdefault((row["model"], row["task"]), {})[row["method"], row["target"]] = row
    return dict(sorted(found.items(), key=lambda item: -item[1][MEASURED]["kl"] if MEASURED in item[1] else 0.0))


def long_rows(document: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Row]]:
    """The rows of each model, task and number of chunks by method: first the largest, where reuse is most wrong."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in document["rows"]:
        if row["linked"] is None:
            found.setdefault((row["model"], row["task"], row["chunks"]), {})[row["method"]] = row
    complete = {key: rows for key, rows in found.items() if LONG_DEFAULT in rows and LONG_REUSE in rows}

    def order(key: tuple[str, str, int]) -> tuple[int, float]:
        return LARGEST_FIRST.index(key[0]), -complete[key][LONG_REUSE]["kl_mean"]

    return {key: complete[key] for key in sorted(complete, key=order)}


def largest_rows(document: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Row]]:
    """Those of `long_rows` that are of the largest model, with six chunks."""
    found = long_rows(document)
    largest = next(iter(found))[0]
    return {key: rows for key, rows in found.items() if key[0] == largest and key[2] == FRONT_CHUNKS}


def _prompts(key: tuple[str, str, int], row: Row) -> str:
    """Which prompts a row is about."""
    model, task, chunks = key
    return f"{MODELS[model]}, {row['n']} of {TASKS[task]}, {chunks} chunks"


def _front(document: dict[str, Any]) -> list[str]:
    """The largest model's rows, a table for each task."""
    titles = ("first token", "error", "geometric", "worse", "right answers", "kept")
    lines = []
    for (_, task, _), rows in largest_rows(document).items():
        count, full = rows[LONG_REUSE]["n"], rows[LONG_REUSE]["kept_of"]
        lines += [f"{TASKS[task]}, {count} prompts:", "", *_head("cost, rule", titles)]
        lines.append(f"| 100 %, full prefill | 1 x | 0 | 0 | | {full} | {full} |")
        for method, name in FRONT.items():
            row = rows[method]
            error, geometric, worse = _of_reuse(row), *_long_cells(row).split(" | ")[:2]
            kept = f"{row['kept'] * full:.0f}"
            speed = f"{row['ttft_x']:.1f} x"
            shown = (name, speed, error, geometric, worse, str(row["right"]), kept)
            lines.append(f"| {' | '.join(shown)} |")
        lines.append("")
    return lines[:-1]


def _of_reuse(row: Row) -> str:
    """The mean error as a share of reuse's, with its interval."""
    if row["method"] == LONG_REUSE:
        return "1"
    return f"{row['of_reuse']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def _long_cells(row: Row) -> str:
    """The geometric error, how often it is worse than reuse, and right answers."""
    is_reuse = row["method"] == LONG_REUSE
    geometric = "1" if is_reuse else f"{row['geometric']:.2f}"
    worse = "" if is_reuse else f"{100 * row['made_worse']:.0f} %"
    return f"{geometric} | {worse} | {_right(row)}"


def _right(row: Row) -> str:
    """How many answers are right, and how many of full prefill's right ones are."""
    kept = (row["kept"] or 0) * row["kept_of"]
    return f"{row['right']}, {kept:.0f}/{row['kept_of']}"


def _regime(document: dict[str, Any]) -> list[str]:
    """Every row of prompts with long chunks: the largest model's whole, the others' errors."""
    found = long_rows(document)
    largest = largest_rows(document)
    cells = ("nats: mean, median", "error", "geometric", "worse", "right, kept", "first token", "same answer")
    default = " and ".join(f"{rows[LONG_DEFAULT]['of_reuse']:.2f}" for rows in largest.values())
    fast = " and ".join(f"{rows[LONG_FAST]['of_reuse']:.2f}" for rows in largest.values())
    lines = [f"**On the largest model the default leaves {default} of reuse's error at 30 %, {fast} at 15 %.**", ""]
    for key, rows in largest.items():
        lines += [f"{_prompts(key, rows[LONG_REUSE])}:", "", *_head("rule, cost", cells)]
        for method, name in LONG.items():
            if method in rows:
                row = rows[method]
                nats = f"{row['kl_mean']:.3f}, {row['kl_median']:.3f}"
                last = f"{row['ttft_x']:.1f} x | {100 * row['same_answer']:.0f} %"
                shown = (name, nats, _of_reuse(row), _long_cells(row), last)
                lines.append(f"| {' | '.join(shown)} |")
        lines.append("")
    names = [name for method, name in LONG.items() if method != LONG_REUSE]
    lines += _head("error; prompts of 6 chunks", ("reuse, nats", *names, "right, kept: reuse", "default"))
    for key, rows in found.items():
        if key not in largest:
            lines.append(_other_errors(key, rows))
    return lines


def _other_errors(key: tuple[str, str, int], rows: dict[str, Row]) -> str:
    """The errors of a model and task by rule, in one line."""
    model, task, _ = key
    reuse = rows[LONG_REUSE]
    errors = [_of_reuse(rows[method]) if method in rows else "" for method in LONG if method != LONG_REUSE]
    counts = [_right(row) for row in (reuse, rows[LONG_DEFAULT])]
    cells = (f"{MODELS[model]}, {reuse['n']} of {TASKS[task]}", f"{reuse['kl_mean']:.3f}", *errors, *counts)
    return f"| {' | '.join(cells)} |"


def _robust(document: dict[str, Any]) -> list[str]:
    """What rules leave of the error at 15 %, a line for each model and task; * beats tokens at random."""
    found = robust_rows(document)
    rules = {key for rows in found.values() for key in rows if key[1] == MEASURED[1] and key[0].endswith("@text")}
    keys = [REUSE, MEASURED, *sorted(rules - {MEASURED})]
    names = (_of(method.removesuffix("@text")) for method, _ in keys)
    lines = _head("model, prompts", names)
    for (model, task), rows in found.items():
        errors = [_kl_and_star(rows.get(key)) for key in keys]
        prompts = f"{MODELS[model]}, {rows[REUSE]['n']} of {TASKS[task]}"
        lines.append(f"| {prompts} | {' | '.join(errors)} |")
    return lines


def _kl_and_star(row: Row | None) -> str:
    """The error that is left, and a star where it is told to be less than that of tokens at random."""
    if not row:
        return ""
    beats_random = row["of_random"] and row["of_random"][2] < 1 and not row["method"].startswith("random")
    return _kl(row) + ("*" if beats_random else "")


def _rules(document: dict[str, Any]) -> list[str]:
    """Every rule: what it does, whose it is, the ratio that a charge of 15 % buys, what it leaves by family."""
    found = robust_rows(document).values()
    families = dict.fromkeys(rows[REUSE]["family"] for rows in found)
    about = plugins.describe("selectors")
    keys = {name: (f"{name}@text", MEASURED[1]) for name in about} | {"none": REUSE}
    rules = {name: [rows[key] for rows in found if key in rows] for name, key in keys.items()}
    lines = _head(f"rule | recomputes | ratio for {100 * MEASURED[1]:.0f} %", families)
    others = ["", "Not measured in this way:", ""]
    for name, rows in sorted(rules.items(), key=lambda item: sum(row["kl"] for row in item[1]) or math.inf):
        what = _with_papers(name, about[name].removeprefix("Recompute ").rstrip("."))
        if not rows:
            others.append(f"* `{name}`: {what}.")
            continue
        ratios = sorted(f"{row['ratio']:.2f}" for row in rows)
        cells = [what, " to ".join(dict.fromkeys(ratios[:1] + ratios[-1:]))]
        cells += [", ".join(f"{row['kl']:.2f}" for row in rows if row["family"] == family) for family in families]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines + others


def _with_papers(name: str, what: str) -> str:
    """What a selector does, with a link for each paper that its source names by its number at arXiv."""
    module = sys.modules[plugins.load("selectors", name).__module__]
    source = " ".join((module.__doc__ or "").partition("Source: ")[2].partition("Differs:")[0].split())
    behind = ["ours"] * source.startswith("ours")
    for paper, number in re.findall(r"(\w+(?: KV)?) \((?:arXiv )?(\d{4}\.\d{5})\)", source):
        link = f"[{paper}](https://arxiv.org/abs/{number})"
        behind += [link] * (paper not in what)
        what = what.replace(paper, link, 1)
    return f"{what}; {', '.join(behind)}" if behind else what


def _families(document: dict[str, Any]) -> list[str]:
    """Every model type, by whether it is blended, moved and extended exactly."""
    rows = document["models"]
    exact = [sum(_mark(row, name) == YES for row in rows) for name in families.VERDICTS]
    partly = [row for row in rows if any(_mark(row, name) == YES for name in families.VERDICTS)]
    return [
        f"Of {len(rows)} model types {exact[0]} blend, {exact[1]} move, {exact[2]} extend, {exact[3]} heal exactly; "
        f"{exact[4]} heal in bfloat16.",
        "",
        *_by_marks(partly, families.VERDICTS, "blend | move | extend | heal | heal in bfloat16"),
        "",
        *_legend(partly),
        "",
        "All other types are refused, because:",
        "",
        *_by_reason([row for row in rows if judged(row) and row not in partly]),
        "",
        f"Not judged, because no tiny model can be built: {', '.join(_type(row) for row in rows if not judged(row))}.",
    ]


def _by_reason(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each reason, with its types; the most come first."""
    types: dict[str, list[str]] = {}
    for row in rows:
        types.setdefault(LEGEND[_number(row["reason"]) - 1], []).append(_type(row))
    return [
        f"* **{reason}:** {', '.join(types[reason])}" for reason in sorted(types, key=lambda name: -len(types[name]))
    ]


def _by_marks(rows: list[dict[str, Any]], names: Iterable[str], head: str) -> list[str]:
    """A line for each combination of marks, with its types; what is exact comes first."""
    types: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        types.setdefault(tuple(_mark(row, name) for name in names), []).append(_type(row))
    lines = _head(head, ["types"])
    for marks in sorted(types, key=lambda marks: ([mark != YES for mark in marks], -len(types[marks]), marks)):
        lines.append(f"| {' | '.join(marks)} | {', '.join(types[marks])} |")
    return lines


def _mark(row: dict[str, Any], name: str) -> str:
    """✓, or – and the number of the reason, or ? where nothing could be tried."""
    if not judged(row) or name not in row:
        return UNJUDGED
    reason = row[name] or EXACT
    return YES if reason == EXACT else f"{NO} {_number(reason)}"


def _number(reason: str) -> int:
    return 1 + LEGEND.index(next(meaning for words, meaning in REASONS if words in reason))


def _legend(rows: list[dict[str, Any]]) -> list[str]:
    """What the numbers of these rows mean."""
    said = [row[name] for row in rows for name in families.VERDICTS if row.get(name)]
    numbers = sorted({_number(reason) for reason in said if reason != EXACT})
    meanings = [f"* {number}: {LEGEND[number - 1]}." for number in numbers]
    return [f"{YES} exact · {NO} refused, because:", "", *meanings]


def _type(row: dict[str, Any]) -> str:
    return f"{row['model']} (its tower is timm's)" if not judged(row) and "timm" in row["reason"] else row["model"]


def _support(document: dict[str, Any]) -> list[str]:
    """How many model types are blended, in a sentence."""
    rows = document["models"]
    count = sum(row["supported"] for row in rows)
    unknown = sum(not judged(row) for row in rows)
    apart = f"; {unknown} could not be tried" if unknown else ""
    return [
        f"Of the {len(rows)} causal model types of transformers, {count} are blended exactly; "
        f"[each is listed](docs/models.md), the others with the reason{apart}."
    ]


def _healing(document: dict[str, Any]) -> list[str]:
    """How far the turns of a conversation are from stock's, by the share that was healed between them."""
    lines = ["| model, prompts | healed after each turn | first turn | second | third |", "|---|---|---|---|---|"]
    for row in document["rows"]:
        if row["method"].split()[1] not in ("0.00", "1.00"):  # the picture has them
            continue
        method, share = row["method"].split()
        healed = "reuse, never healed" if method == "reuse" else f"{float(share):.0%}" if float(share) else "never"
        about = f"{row['model']} in {row['dtype']}, {row['n']}, {row['tokens']} tokens" if method == "reuse" else ""
        cells = [f"{mean:.4f} ({median:.4f})" for mean, median in zip(row["kl"], row["kl_median"], strict=True)]
        lines.append(f"| {about} | {healed} | {' | '.join(cells)} |")
    costs = {row["model"]: row["heal_of_stock"] for row in document["rows"] if row["heal_of_stock"]}
    said = " and ".join(f"{cost:.2f} ({model})" for model, cost in costs.items())
    return [*lines, "", f"Healing takes {said} of the CPU seconds of a stock prefill in the same blocks."]


def _edits(document: dict[str, Any]) -> list[str]:
    """The error of moving alone by edit, what of it is left, and how much sooner the first token is."""
    edits = list(dict.fromkeys(row["edit"] for row in document["rows"]))
    lines = _head("model", ("", *edits))
    leaks = []
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        rows = {(row["edit"], row["way"]): row for row in document["rows"] if row["model"] == model}
        moved = [f"{rows[edit, 'moved']['kl']:.4f}" for edit in edits]
        lines.append(f"|{model}, {rows[edits[0], 'moved']['n']}|moved|{'|'.join(moved)}|")
        blended = [rows[edit, "blended .15"] for edit in edits]
        shares = ["{:.2f} [{:.2f}, {:.2f}]".format(*row["of_moved"]) for row in blended]
        lines.append(f"||left at 15 %|{'|'.join(shares)}|")
        lines.append(f"||speed-up|{'|'.join(str(row['speed']) for row in blended)}|")
        asked = {row["way"]: row for row in rows.values() if "says" in row}
        if asked["not dropped"]["says"]:  # else the model never says it, and nothing is shown
            counts = ", ".join(f"{way} {row['says']}" for way, row in asked.items() if "healed" not in way)
            leaks += ["", f"How often {model} said a dropped code word, of {asked['compute']['n']} times: {counts}."]
    return [*lines, *leaks]


def _chain_trace(document: dict[str, Any]) -> list[str]:
    """What chains and their order bring over a trace: all requests of a model, then those with a new question."""
    ways = {"blend": "blend", "chains": "chains", "order": "chains, ordered"}
    titles = ("requests", "exact tokens", "nats: mean, median", "first token", "F1, full prefill's")
    lines = _head("model", titles)
    named = ""
    for row in document["rows"]:
        if row["requests"] == "new" and row["way"] == "chains":
            continue  # no chain has them
        asked = f"{row['n']}" if row["requests"] == "all" else f"{row['n']} new"
        errors = f"{row['kl']:.3f}, {row['kl_median']:.3f}"
        scores = f"{row['f1']:.3f}, {row['full_f1']:.3f}"
        model = "" if row["model"] == named else f"{row['model']}, {row['n_compared']} compared"
        named = row["model"]
        cells = (model, f"{asked}, {ways[row['way']]}", f"{row['exact']:.0%}", errors, f"{row['speed']:.1f}x", scores)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


TABLES = {
    "healing": _healing,
    "edits": _edits,
    "chain_trace": _chain_trace,
    "front": _front,
    "regime": _regime,
    "robust": _robust,
    "rules": _rules,
    "families": _families,
    "real_answers": _answers,
    "support": _support,
}


def main() -> None:
    """Rewrite the tables of the README and of the pages in docs."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page.write_text(filled(page.read_text("utf-8"), ROOT / "benchmarks" / "results"), encoding="utf-8")


if __name__ == "__main__":
    main()
