# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of the README and of docs, written from the committed results, so that no number is typed.

python -m hf_blend.evaluation.readme
"""

import json
import re
from pathlib import Path
from typing import Any

from hf_blend.verify.everything import judged

from .measured import MEASURED, acceptance, store

ROOT = Path(__file__).resolve().parent.parent
MOST_LETTERS = 140  # of a reason in a table
# tables named otherwise than their result file
SOURCES = {
    "ends": "eval2",
    "acceptance": "sparse_quality",
    "support": "families",
    "images_read": "families",
    "kvstar_overlap": "kvstar_draft",
}
# rows of the short table
ENDS = (("full-prefill", None), ("full-reuse", None), ("kv-deviation", 0.15), ("query-attention", 0.15))
PLACE = re.compile(r"<!--table:(?P<name>\w+)-->\n.*?<!--end-->", re.DOTALL)


def filled(text: str, results: Path) -> str:
    """Put every table in its place.

    Args:
        text: Markdown with places `<!--table:NAME-->` … `<!--end-->`.
        results: folder with `NAME.json` for each.

    Returns:
        The same text with the tables made anew.
    """
    return PLACE.sub(lambda place: _table(place["name"], results), text)


def _table(name: str, results: Path) -> str:
    document = json.loads((results / f"{SOURCES.get(name, name)}.json").read_text("utf-8"))
    lines = TABLES[name](document)
    return "\n".join([f"<!--table:{name}-->", *lines, "<!--end-->"])


def _reference(document: dict[str, Any]) -> list[str]:
    """Exact match of every method, paired with full prefill."""
    lines = [
        f"n = {document['rows'][0]['n']} questions.",
        "",
        "| method | nominal | charged | exact match | difference to full prefill |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        low, high = row["difference_interval"]
        gap = "" if row["nominal_ratio"] is None else f"{row['difference_to_full']:+.3f} [{low:+.3f}, {high:+.3f}]"
        shares = [_share(row["nominal_ratio"]), _share(row["charged_budget"])]
        cells = [row["method"], *shares, f"{row['exact_match']:.3f}", gap]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ends(document: dict[str, Any]) -> list[str]:
    """Full prefill, full reuse, and blending between them, on the same prompts."""
    rows = document["rows"]
    lines = [
        f"| {rows[0]['n']} questions to {rows[0]['prompt_tokens']:,.0f} tokens | recomputed | charged | first token "
        "| exact match |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if (row["method"], row["ratio"]) not in ENDS:
            continue
        charged = row["charged_budget"]
        shares = [_share(charged if row["ratio"] is None else row["ratio"]), _share(charged)]
        name = {"full-prefill": "full prefill", "full-reuse": "full reuse", "kv-deviation": "blend"}.get(
            row["method"], f"blend, `{row['method']}`"
        )
        time = f"{row['ttft_ms']:.0f} ms, {row['speedup']:.1f} x"
        score = f"{row['score']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        lines.append(f"| {name} | {' | '.join(shares)} | {time} | {score} |")
    return lines


def _break_even(document: dict[str, Any]) -> list[str]:
    """Short prompts: full prefill against blending."""
    machine = document["machine"]
    methods = list(document["break_even_tokens"])
    lines = [
        f"Shape of {machine['shape']}, {machine['dtype']}, {machine['threads']} threads, median of "
        f"{machine['rounds']}, every chunk in memory.",
        "",
        f"| prompt | full prefill | {' | '.join(methods)} |",
        f"|---|---|{'---|' * len(methods)}",
    ]
    for tokens in sorted({row["prompt_tokens"] for row in document["rows"]}):
        rows = {row["method"]: row for row in document["rows"] if row["prompt_tokens"] == tokens}
        cells = [f"{rows[one]['ttft_ms']:.0f} ms, {rows[one]['speedup']:.2f} x" for one in methods]
        lines.append(f"| {tokens} tokens | {rows[methods[0]]['full_ms']:.0f} ms | {' | '.join(cells)} |")
    return lines


def _ttft(document: dict[str, Any]) -> list[str]:
    """Speed-up at every ratio, beside the bound."""
    full, machine = document["full"], document["machine"]
    lines = [
        f"Full prefill {full['ttft_ms'] / 1e3:.2f} s, decoding {full['decode_tokens_s']:.1f} tokens/s; "
        f"torch {machine['torch']}, transformers {machine['transformers']}, {machine['threads']} threads.",
        "",
        "| nominal | charged | first token | speed-up | FLOP bound | share of it | realign | select | decoding |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        shares = [_share(row["ratio"]), _share(row["charged_budget"]), f"{row['ttft_ms'] / 1e3:.2f} s"]
        speed = [f"{row['speedup']:.2f} x", f"{row['flop_bound']:.2f} x", _share(row["bound_share"])]
        spent = [f"{row['realign_ms']:.0f} ms", f"{row['select_ms']:.0f} ms", f"{row['decode_vs_dynamic']:.2f} x"]
        cells = [*shares, *speed, *spent]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _families(document: dict[str, Any]) -> list[str]:
    """Every model type, and whether it is blended, moved and extended: exact, or the reason why not."""
    rows = document["models"]
    counts = [sum(row["supported"] for row in rows), *(_exact(rows, name) for name in ("move", "extend"))]
    unknown = sum(not judged(row) for row in rows)
    apart = f"; of {unknown} no tiny model can be built, and they are not judged" if unknown else ""
    lines = [
        f"Of {len(rows)} model types {counts[0]} blend, {counts[1]} move and {counts[2]} extend exactly{apart}.",
        "",
        "| type | blend | move | extend | rotary style | windows |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: not row["supported"]):
        blend = "exact" if row["supported"] else row["reason"]
        found = [(blend, row["max_abs_error"]), *((row[name], row[f"{name}_error"]) for name in ("move", "extend"))]
        results = [_result(*found[0]), *(_result(*one, blend) for one in found[1:])]
        cells = [row["model"], *results, row["rotary"], row["window"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _images_read(document: dict[str, Any]) -> list[str]:
    """Every type that reads images, and whether these are chunks: exact, or the reason why not."""
    rows = document["images"]
    exact, unknown = sum(row["supported"] for row in rows), [_unknown(row) for row in rows if not judged(row)]
    lines = [
        f"Of {len(rows)} types that read images {exact} blend them exactly; {len(unknown)} are not judged.",
        "",
        "| type | images as chunks |",
        "|---|---|",
    ]
    for row in sorted(filter(judged, rows), key=lambda row: not row["supported"]):
        reason = "exact" if row["supported"] else row["reason"]
        lines.append(f"| {row['model']} | {_result(reason, row['max_abs_error'])} |")
    return [*lines, "", f"Not judged, for want of a tiny model: {', '.join(unknown)}."] if unknown else lines


def _unknown(row: dict[str, Any]) -> str:
    return f"{row['model']} (its tower is timm's)" if "timm" in row["reason"] else str(row["model"])


def _support(document: dict[str, Any]) -> list[str]:
    """How many model types are blended, in a sentence."""
    rows = document["models"]
    count, unknown = sum(row["supported"] for row in rows), sum(not judged(row) for row in rows)
    apart = f"; {unknown} could not be tried" if unknown else ""
    return [
        f"Of the {len(rows)} causal model types of transformers, {count} are blended exactly; "
        f"[each is listed](docs/models.md), the others with the reason{apart}."
    ]


def _exact(rows: list[dict[str, Any]], name: str) -> int:
    return sum(row[name] == "exact" for row in rows)


def _result(reason: str, error: float | None, blend: str | None = None) -> str:
    """A verdict in a table; the reason why nothing at all is done with a type is given once."""
    if reason == "exact":
        return "exact" if error is None else f"exact, {error:.1e}"
    return "refused likewise" if reason == blend else _short(reason)


def _short(reason: str) -> str:
    """The first sentence of a reason, on one line and without what would break a table."""
    text = " ".join(reason.replace("|", "/").split())
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS].rsplit(' ', 1)[0]} …"


def _context_shift(document: dict[str, Any]) -> list[str]:
    """Shifted beside fresh."""
    reading, writing = document["reading"], document["writing"]
    low, high = reading["answers_difference_interval"]
    loss_low, loss_high = reading["loss_difference_interval"]
    held, unbounded = writing["cache_bytes"] / 1e6, writing["unbounded_cache_bytes"] / 1e6
    return [
        f"{reading['tokens']} tokens read and {writing['tokens']} written through a window of "
        f"{document['window_tokens']}: {held:.1f} MB of cache, where {unbounded:.1f} MB would be needed for all.",
        "",
        "| after a shift | shifted cache | fresh prefill of the same tokens | difference |",
        "|---|---|---|---|",
        f"| right answers, n = {reading['questions']} | {reading['answers_shifted']:.3f} | "
        f"{reading['answers_fresh']:.3f} | {reading['answers_shifted'] - reading['answers_fresh']:+.3f} "
        f"[{low:+.3f}, {high:+.3f}] |",
        f"| loss on the next chunk, {reading['shifts']} shifts | {reading['loss_shifted']:.3f} | "
        f"{reading['loss_fresh']:.3f} | {reading['loss_shifted'] - reading['loss_fresh']:+.3f} "
        f"[{loss_low:+.3f}, {loss_high:+.3f}] |",
    ]


def _self_extend(document: dict[str, Any]) -> list[str]:
    """Needle questions beyond the trained length."""
    lines = [
        f"Trained length {document['trained_tokens']} tokens.",
        "",
        "| prompt | plain | Self-Extend | window, group |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
        scores = [f"{row[name]:.3f} [{row[f'{name}_interval'][0]:.3f}, {row[f'{name}_interval'][1]:.3f}]"
                  for name in ("plain", "extended")]  # fmt: skip
        size = f"{row['mean_tokens']:.0f} tokens, n = {row['n']}"
        lines.append(f"| {size} | {' | '.join(scores)} | {row['window_tokens']}, {row['group_tokens']} |")
    return lines


def _session(document: dict[str, Any]) -> list[str]:
    """Time to the first token, turn by turn."""
    lines = [
        f"Shape of {document['shape']}, {document['dtype']}, {document['threads']} threads, median of "
        f"{document['rounds']}.",
        "",
        "| turn | prompt | full prefill | kept cache | speed-up | with loading the file |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        times = [f"{row['full_ms']:.0f} ms", f"{row['kept_ms']:.0f} ms"]
        speed = [f"{row['speedup']:.1f} x", f"{row['speedup_with_load']:.1f} x"]
        lines.append(f"| {row['turn']} | {row['prompt_tokens']} tokens | {' | '.join([*times, *speed])} |")
    return lines


def _sequences(document: dict[str, Any]) -> list[str]:
    """A decoding step of a batch over a shared prefix, and bytes, by the tokens that each sequence has of its own."""
    lines = [
        f"Shape of {document['shape']}, {document['dtype']}, {document['threads']} thread(s), {document['sequences']} "
        f"sequences behind {document['prefix_tokens']:,} shared tokens, median of {document['rounds']} steps in turn.",
        "",
        "| own tokens | stock step (`DynamicCache`) | of a static cache | shared cells | share of stock, of static | "
        "bytes | of stock |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        times = [f"{row[f'{name}_ms']:.0f} ms" for name in ("stock", "static", "shared")]
        shares = f"{row['shared_over_stock']:.2f}, {row['shared_over_static']:.2f}"
        sizes = [f"{row[name] / 1e6:.0f} MB" for name in ("nbytes", "stock_nbytes")]
        lines.append(f"| {row['tail_tokens']} | {' | '.join([*times, shares, *sizes])} |")
    return lines


def _study(document: dict[str, Any]) -> list[str]:
    """Final rows, set by set, the cheapest first; those of the search are in the file alone."""
    rows = _studied(document)
    lines = [
        "n is how many questions were asked.",
        "",
        "| questions | method | nominal | charged | exact match, 95 % interval | of full prefill |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = [_share(row["ratio"]), f"{100 * row['charged_budget']:.1f} %"]
        score = f"{row['score']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        name = f"{row['task']} | {row['method']}"
        lines.append(f"| {name} | {' | '.join(shares)} | {score} | {row['share_of_full']:.3f} |")
    return lines


def _studied(document: Any) -> list[dict[str, Any]]:
    rows = [row for row in document["rows"] if row["part"] == "final"]
    return sorted(rows, key=lambda row: (row["task"], row["charged_budget"]))


EVAL2_COLUMNS = (
    "method", "nominal", "charged", "exact match", "difference to full prefill", "KL to full", "first token",
    "speed-up", "read",
)  # fmt: skip


def _eval2(document: dict[str, Any]) -> list[str]:
    """Quality, time and bytes of every method on the same long prompts."""
    rows = document["rows"]
    settings = rows[0]
    lines = [
        f"Model `{settings['model']}`, task `{settings['task']}`, n = {settings['n']} prompts of "
        f"{settings['prompt_tokens']:,.0f} tokens on average, {document['settings']['threads']} thread(s).",
        "",
        f"| {' | '.join(EVAL2_COLUMNS)} |",
        "|---" * len(EVAL2_COLUMNS) + "|",
    ]
    for row in rows:
        gap = f"{row['difference']:+.3f} [{row['difference_low']:+.3f}, {row['difference_high']:+.3f}]"
        kl = "" if row["kl"] is None else f"{row['kl']:.3f}"
        times = "|" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f} ms | {row['speedup']:.2f} x"
        lines.append(
            f"| {row['method']} | {_share(row['ratio'])} | {100 * row['charged_budget']:.1f} % | {row['score']:.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}] | {gap} | {kl} | {times} | {row['read_bytes'] / 1e6:.1f} MB |"
        )
    return lines


TABLES = {
    "ends": _ends,
    "eval2": _eval2,
    "break_even": _break_even,
    "study": _study,
    "reference": _reference,
    "ttft": _ttft,
    "families": _families,
    "images_read": _images_read,
    "support": _support,
    "context_shift": _context_shift,
    "self_extend": _self_extend,
    "session": _session,
    "sequences": _sequences,
    "store": store,
    "acceptance": acceptance,
    **MEASURED,
    "ttft_disk_spare": MEASURED["ttft_disk"],
    "store_plan_small": MEASURED["store_plan"],
    "partial_load_chains": MEASURED["partial_load"],
    "partial_quality_batch": MEASURED["partial_quality"],
}


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def main() -> None:
    """Rewrite the tables of the README and of the pages in docs."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page.write_text(filled(page.read_text("utf-8"), ROOT / "benchmarks" / "results"), encoding="utf-8")


if __name__ == "__main__":
    main()
