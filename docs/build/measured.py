# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page docs/measurements.md, written from the committed results: a section is one question, its verdict first.

python docs/build/measured.py
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]
Cell = Callable[[Document], str]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Measurements

Each section asks one question, answers it, and shows one table. Every figure comes from the committed file that the
section names; the file also holds settings, versions, and what was measured besides. `make docs` writes this page.

Unless a section says otherwise, models have random weights in the proportions of the model that is named, so the
figures are about time and bytes. They cannot show answers; [Choosing](choosing.md) is about these. The machine has two
CPU cores and was not always quiet: ways took turns in one run, and ratios say more than milliseconds. What did not
help is in [benchmarks/LOG.md](../benchmarks/LOG.md).
"""


def every_row(document: Document) -> Sequence[Document]:
    """All rows of a document."""
    rows: Sequence[Document] = document["rows"]
    return rows


@dataclass(frozen=True)
class Section:
    """One question and what was measured about it."""

    title: str
    file: str
    question: str
    verdict: Callable[[Document], str]
    how: Callable[[Document], str]
    columns: Mapping[str, Cell]
    cannot_show: str
    rows: Callable[[Document], Sequence[Document]] = every_row
    behind: str = ""

    def written(self, document: Document) -> str:
        """The section as Markdown."""
        lines = [f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
        lines += [f"| {' | '.join(cell(row) for cell in self.columns.values())} |" for row in self.rows(document)]
        link = f"[{self.file}.json](../benchmarks/results/{self.file}.json)"
        parts = [f"## {self.title}", f"{self.question} **{self.verdict(document)}**", "\n".join(lines)]
        parts += [self.behind] if self.behind else []
        return "\n\n".join([*parts, f"{self.how(document)} {self.cannot_show} File: {link}."])


def text(name: str, none: str = "") -> Cell:
    """A value as it is."""
    return lambda row: none if row.get(name) is None else str(row[name])


def number(name: str, form: str = ".2f", unit: str = "") -> Cell:
    """A number in a form such as ".2f"."""
    return lambda row: "" if row.get(name) is None else f"{row[name]:{form}}{unit}"


def with_interval(name: str, form: str) -> Cell:
    """A number with its 95 % interval."""
    return lambda row: f"{row[name]:{form}} [{row[f'{name}_interval'][0]:{form}}, {row[f'{name}_interval'][1]:{form}}]"


def percent(name: str) -> Cell:
    """A share in percent."""
    return lambda row: "" if row.get(name) is None else _share(row[name])


def megabytes(name: str) -> Cell:
    """Bytes in 10^6 of them."""
    return lambda row: f"{row[name] / 1e6:.0f} MB" if row.get(name) is not None else ""


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _first(document: Document, **known: Any) -> Document:
    """The first row with these values."""
    return next(row for row in document["rows"] if all(row.get(name) == value for name, value in known.items()))


def _setting(document: Document) -> str:
    """The model, and how often something was measured."""
    given = {**document.get("machine", {}), **document}
    return f"{given['shape']}, {given['dtype']}, {given['threads']} threads, median of {given['rounds']}"


def _short_prompts(document: Document) -> list[Document]:
    """A row for each length, with the times of both methods."""
    found: dict[int, dict[str, Any]] = {}
    for row in document["rows"]:
        made = found.setdefault(row["prompt_tokens"], {"tokens": row["prompt_tokens"], "full": row["full_ms"]})
        made[row["method"]] = f"{row['ttft_ms']:.0f} ms, {row['speedup']:.2f} x"
    return list(found.values())


def _ways(document: Document) -> list[Document]:
    """A row for each way, with its times at each length."""
    found: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(document["rows"]):
        made = found.setdefault(row["way"], {"way": row["way"]})
        length = ("short", "long")[number * 2 // len(document["rows"])]
        made[length] = f"{row['cpu_s']:.2f} s, {row['times_q8_0']:.1f} x"
    return list(found.values())


def _against_llama(document: Document) -> str:
    blends = [row for row in document["rows"] if row["way"].startswith("blend kv-deviation")]
    ratios = " and ".join(f"{row['times_q8_0']:.1f}" for row in blends)
    return (
        f"Blending at 15 % is {ratios} times earlier than llama.cpp's full prefill with weights in 8 bits, "
        f"at {' and '.join(format(row['tokens'], ',') for row in blends)} tokens, and is less exact than that."
    )


def _held(document: Document) -> str:
    row = document["rows"][-1]
    return (
        f"At {row['tail_tokens']} tokens of its own each, a step takes {row['shared_over_stock']:.2f} of the time "
        f"of stock and {row['nbytes'] / row['stock_nbytes']:.2f} of its bytes."
    )


def _hidden(document: Document) -> str:
    worst = max(row["vs_max"] for row in document["rows"])
    return f"Mostly: side by side takes at most {worst:.2f} times the longer of both."


def _planned(document: Document) -> str:
    count, right, refuted = len(document["rows"]), document["right"], document["refuted"]
    return f"In {right} of {count} cells it is the best device; in {refuted} the rounds refute it."


EXTEND = "Self-Extend"
WAYS = {  # of docs/holding_less.md: in the result file, on the page, and beside what it is measured
    "kv_bits 8": ("`kv_bits=8`", "the blend"),
    "kv_bits 4": ("`kv_bits=4`", "the blend"),
    "gsa 0.5": ("`sparse=0.5`", "full prefill"),
    "gsa 0.25": ("`sparse=0.25`", "full prefill"),
    "kvstar 0.25": ("the same, method `kvstar`", "full prefill"),
    "random 0.25": ("the same, method `random`", "full prefill"),
    "partial 0.5": ("`partial=0.5`", "the blend"),
    "partial 0.25": ("`partial=0.25`", "the blend"),
}


def _less(document: Document) -> str:
    few, quarter, chance, loaded = (
        _first(document, way=way) for way in ("kv_bits 4", "gsa 0.25", "random 0.25", "partial 0.25")
    )
    return (
        f"By {few['kl']:.4f} nats in 4 bits, by {quarter['kl']:.3f} where a step looks at a quarter of the blocks "
        f"({chance['kl']:.2f} at a random quarter), by {loaded['kl']:.3f} where {_share(loaded['share'])} of the "
        f"bytes are loaded; the blend itself is {_first(document, way='blend')['kl_full']:.3f} off full prefill."
    )


def _beyond(document: Document) -> str:
    shifted, cut, extended = (
        _share(_first(document, way=way)["times"] - 1)
        for way in ("ShiftCache", "the newer half prefilled again", EXTEND)
    )
    return (
        f"`ShiftCache` costs {shifted} of perplexity and computes nothing again; prefilling the newer half again "
        f"costs {cut}, and Self-Extend, which keeps all of K and V, {extended}."
    )


def _first_token(title: str, result: str, question: str, ratio: float, behind: str = "") -> Section:
    """A table of `hf-blend bench ttft`, with the verdict at a ratio."""
    return Section(
        title,
        result,
        question,
        lambda found: (
            f"Charged {_share(_first(found, ratio=ratio)['charged_budget'])} of a prefill, "
            f"{_first(found, ratio=ratio)['speedup']:.1f} times, "
            f"{_share(_first(found, ratio=ratio)['bound_share'])} of what the saved FLOPs allow."
        ),
        lambda found: (
            f"`hf-blend bench ttft`: {_setting(found['machine'])}, a prompt of "
            f"{found['rows'][0]['prompt_tokens']:,} tokens, "
            f"every chunk in memory; full prefill takes {found['full']['ttft_ms'] / 1e3:.2f} s."
        ),
        {
            "recomputed": lambda row: f"{100 * row['ratio']:.1f} %",
            "charged": lambda row: f"{100 * row['charged_budget']:.1f} %",
            "first token": lambda row: f"{row['ttft_ms'] / 1e3:.2f} s",
            "speed-up": number("speedup", ".2f", " x"),
            "FLOP bound": number("flop_bound", ".2f", " x"),
            "decoding beside stock": number("decode_vs_dynamic", ".2f", " x"),
        },
        "A speed-up above its bound at 100 % is noise. It cannot show answers, nor the time on a GPU.",
        behind=behind,
    )


SECTIONS = (
    _first_token(
        "Time to the first token",
        "ttft",
        "How much earlier is the first token of a long prompt?",
        0.15,
        behind="![First token against cost](pictures/speed.svg)",
    ),
    _first_token("At 2,000 tokens", "ttft_2000", "How much earlier is it in a prompt of usual length?", 0.095),
    Section(
        "Beside llama.cpp",
        "llama_cpp",
        "Is a blend on a CPU earlier than llama.cpp on the same weights?",
        _against_llama,
        lambda found: (
            "`benchmarks/llama_cpp.py`: SmolLM2-135M-Instruct, the same ids, CPU seconds of "
            f"{found['settings']['threads']} thread on a machine with AVX-512, median of "
            f"{found['settings']['rounds']} rounds in turns, chunks in memory; behind the time how many times as "
            "early as Q8_0. Everything but llama.cpp computes in float32."
        ),
        {"way": text("way"), "about 1,000 tokens": text("short"), "about 2,000 tokens": text("long")},
        "It cannot show other processors, more threads, larger models, or llama.cpp's reuse of exact prefixes.",
        _ways,
    ),
    Section(
        "Short prompts",
        "break_even",
        "From which length on does blending pay?",
        lambda found: f"From about {min(found['break_even_tokens'].values())} tokens on.",
        lambda found: f"`hf-blend bench break-even`: {_setting(found['machine'])}, every chunk in memory.",
        {
            "prompt": number("tokens", "d", " tokens"),
            "full prefill": number("full", ".0f", " ms"),
            "boundary, 15 %": text("boundary@0.15"),
            "boundary, 5 %": text("boundary@0.05"),
        },
        "It cannot show another model's length: thin models pay later.",
        _short_prompts,
    ),
    Section(
        "Decoding",
        "decode",
        "Is decoding behind a blend as fast as stock?",
        lambda found: (
            f"Yes: at {found['rows'][-1]['context']:,} tokens {found['rows'][-1]['vs_dynamic']:.2f} times as fast "
            f"as a `DynamicCache`, and {found['rows'][-1]['vs_static']:.2f} times as a `StaticCache`."
        ),
        lambda found: f"`benchmarks/bench.py decode`: {_setting(found)}; each cache holds the same K and V.",
        {
            "context": text("context"),
            "tokens/s": number("blend_tokens_s", ".1f"),
            "beside DynamicCache": number("vs_dynamic"),
            "beside StaticCache": number("vs_static"),
        },
        "It cannot show a GPU, where growing a `DynamicCache` costs less beside the rest.",
    ),
    Section(
        "Decoding from K and V beyond the device",
        "offload",
        "What do K and V on disk cost, where memory holds a quarter of them?",
        lambda found: (
            f"Decoding has {_first(found, context=16384, cache='kv_device_map')['vs_device']:.2f} of its speed at "
            "16,384 tokens, and writes the same text."
        ),
        lambda found: f"`benchmarks/bench.py offload`: {_setting(found)}.",
        {
            "context": text("context"),
            "cache": text("cache"),
            "K and V": megabytes("kv_bytes"),
            "held at most": megabytes("peak_resident_bytes"),
            "tokens/s": number("tokens_s"),
            "beside all in memory": number("vs_device"),
        },
        "It cannot show what a GPU gains, whose memory is what is short.",
        lambda found: [row for row in found["rows"] if "error" not in row],
    ),
    Section(
        "Looking at fewer blocks while decoding",
        "sparse_decode",
        "Is decoding over selected blocks faster?",
        lambda found: (
            f"At 32,768 tokens {_first(found, context=32768, way='0.25 locked')['vs_dense']:.2f} times with a "
            "quarter of the "
            f"blocks, at 4,096 {_first(found, context=4096, way='0.25 locked')['vs_dense']:.2f} times; a selection "
            "that is made again in every step costs most of it."
        ),
        lambda found: f"`benchmarks/bench.py sparse-decode`: {_setting(found)}; locked: a selection kept over steps.",
        {
            "context": text("context"),
            "blocks": text("way"),
            "tokens/s": number("tokens_s", ".1f"),
            "beside dense": number("vs_dense"),
        },
        "It cannot show which blocks a text needs: random K and V are attended to evenly.",
        lambda found: [row for row in found["rows"] if row["context"] != 16384 and row["way"] != "0.1 unlocked"],
    ),
    Section(
        "Fewer blocks of K and V on disk",
        "sparse_offload",
        "And where K and V are on disk?",
        lambda found: (
            "There a quarter of the blocks decodes "
            f"{_first(found, context=32768, place='disk', way='0.25 locked')['vs_dense_there']:.1f} "
            "times as fast as all of them at 32,768 tokens, with a quarter of K and V on the device."
        ),
        lambda found: f"`benchmarks/bench.py sparse-offload`: {_setting(found)}; the files are in the page cache.",
        {
            "context": text("context"),
            "blocks": text("way"),
            "tokens/s": number("tokens_s", ".1f"),
            "beside dense on disk": number("vs_dense_there"),
            "beside dense in memory": number("vs_dense_on_device"),
            "on the device": percent("device_share"),
        },
        "It cannot show a cold disk, nor text, in which selections change less.",
        lambda found: [row for row in found["rows"] if row["place"] == "disk" and row["context"] != 2048],
    ),
    Section(
        "Loading a part",
        "partial_load",
        "Is loading a quarter of the blocks faster than loading all?",
        lambda found: (
            f"Not here: {min(row['fewer_bytes'] for row in found['rows']):.1f} to "
            f"{max(row['fewer_bytes'] for row in found['rows']):.1f} times fewer bytes are read, and the first "
            f"token comes {max(1 / row['ttft_ratio'] for row in found['rows']):.2f} times as late at worst."
        ),
        lambda found: (
            f"`benchmarks/bench.py partial-load`: {found['chunks']} chunks of {found['chunk_tokens']} tokens, "
            f"{found['layers']} "
            f"layers whose heads are tied, a model of {found['rows'][0]['shape']} and others, {found['threads']} "
            f"threads, median of {found['rounds']}. Loading whole chunks is hidden behind computing."
        ),
        {
            "model": text("shape"),
            "disk, GB/s": text("rate_gb_s", "its own"),
            "all": megabytes("all_bytes"),
            "loaded": megabytes("loaded_bytes"),
            "all, first token": number("all_ttft_ms", ".0f", " ms"),
            "in part": number("partial_ttft_ms", ".0f", " ms"),
        },
        "It cannot show a good choice of blocks: tied heads always agree. `benchmarks/reproduce.py impress --model M` "
        "measures yours.",
        lambda found: found["rows"][:8],
    ),
    Section(
        "Less of K and V, on a real model",
        "real_decoding",
        "How far off are answers where K and V are in few bits, or only a part is looked at or loaded?",
        _less,
        lambda found: (
            f"`benchmarks/real_context.py decoding`: {found['settings']['model']}, float32, prompts of HotpotQA, n = "
            f"{found['rows'][0]['n']}; KL divergence over ten tokens from the same request with all of K and V, and "
            "in how many tokens the first choice is full prefill's; blocks of "
            f"{found['settings']['block_tokens']} tokens in `sparse`; the blend is that of the default settings, with "
            f"{_share(_first(found, way='blend')['same'])} of full prefill's first choices."
        ),
        {
            "way": lambda row: WAYS[row["way"]][0],
            "of K and V": percent("share"),
            "KL, ten tokens": with_interval("kl", ".4f"),
            "beside": lambda row: WAYS[row["way"]][1],
            "same tokens": percent("same"),
        },
        "It cannot show long contexts, nor long answers, in which a small error may grow.",
        lambda found: [_first(found, way=way) for way in WAYS],
    ),
    Section(
        "Beyond a window",
        "real_window",
        "What is lost of a text that is longer than a window?",
        _beyond,
        lambda found: (
            f"`benchmarks/real_context.py window`: {found['settings']['model']}, float32, passages of Wikipedia, "
            f"{found['settings']['read_tokens']} tokens, a window of {found['settings']['window_tokens']}, n = "
            f"{found['rows'][0]['n']}; perplexity of the tokens behind the window, and how many times that of the "
            "stock cache in which everything is seen."
        ),
        {
            "way": text("way"),
            "perplexity": number("perplexity"),
            "beside everything": lambda row: f"{row['times']:.3f} [{row['times_low']:.3f}, {row['times_high']:.3f}]",
        },
        "It cannot show texts beyond the trained length: the model was trained on 8,192 tokens, so that stock can be "
        "compared.",
    ),
    Section(
        "Where chunks are kept",
        "store_plan",
        "Does `hf-blend store plan` choose the best device?",
        _planned,
        lambda found: (
            f"`benchmarks/bench.py store-plan`: models named in the table, {found['chunks']} chunks of "
            f"{found['chunk_tokens']} "
            f"tokens, {found['threads']} threads, median of {found['rounds']}; the best is the plan's rule applied to "
            "measured requests. With chunks of half the length: "
            "[store_plan_small.json](../benchmarks/results/store_plan_small.json)."
        ),
        {
            "model": text("shape"),
            "recomputed": percent("ratio"),
            "among": lambda row: ", ".join(one["device"] for one in row["devices"]),
            "chosen": text("chosen"),
            "best": text("best"),
            "best in rounds drawn again": percent("chosen_share"),
        },
        "It cannot show the delays of a real network or disk: tiers are throttled to a rate.",
        lambda found: [row for row in found["rows"] if not row["gpu_hour"]],
    ),
    Section(
        "Loading beside computing",
        "ttft_disk_spare",
        "Does loading hide behind computing?",
        _hidden,
        lambda found: f"`benchmarks/bench.py ttft-disk`: {_setting(found['machine'])}, one core to spare.",
        {
            "disk, GB/s": text("rate_gb_s", "its own"),
            "loading": number("load_ms", ".0f", " ms"),
            "computing": number("compute_ms", ".0f", " ms"),
            "one after the other": number("sequential_ms", ".0f", " ms"),
            "side by side": number("pipelined_ms", ".0f", " ms"),
            "to the longer": number("vs_max"),
        },
        "It cannot show a quiet machine: a ratio below 1 is its noise. With no core to spare reading and computing "
        "cost each other: [ttft_disk.json](../benchmarks/results/ttft_disk.json).",
    ),
    Section(
        "The loading controller",
        "pipeline",
        "Does the controller choose as well as the best fixed plan?",
        lambda found: (
            f"Within {_share(max(row['vs_best'] for row in found['rows']) - 1)} by the fastest rounds, within "
            f"{_share(max(row['median_vs_best'] for row in found['rows']) - 1)} by medians."
        ),
        lambda found: (
            f"`benchmarks/bench.py pipeline`: {found['shape']}, layers and tiers that sleep for what they would take, "
            f"fastest of {found['rounds']}; the best of {len(found['plans']) // len(found['rows'])} fixed plans."
        ),
        {
            "load / compute": number("load_to_compute", "g"),
            "pipeline to the longer": number("vs_max", ".3f"),
            "best plan": number("best_ms", ".0f", " ms"),
            "the controller's": number("controller_ms", ".0f", " ms"),
            "expected": number("predicted_ms", ".0f", " ms"),
            "to the best": number("vs_best", ".3f"),
        },
        "It cannot show what reading and computing cost each other where they share cores: sleeps share nothing.",
    ),
    Section(
        "Verifying",
        "store",
        "What does it cost to verify every tensor that is read?",
        lambda found: (
            f"Nothing where the disk is read ({found['cold']['share_of_raw_read']:.2f} of plain reading), and "
            f"{_share(1 - found['warm']['share_of_raw_read'])} of the rate from the page cache."
        ),
        lambda found: (
            f"`benchmarks/bench.py store`: entries of {found['plan']['tokens']} tokens of a model of "
            f"{found['plan']['layers']} "
            f"layers, {found['threads']} threads, median of {found['plan']['rounds']}. A store of "
            f"{found['open_entries']:,} "
            f"entries opens in {found['open_s']:.2f} s; put with full durability writes {found['put_mb_s']:.0f} MB/s."
        ),
        {
            "files": text("files"),
            "read and verified": number("read_mb_s", ".0f", " MB/s"),
            "plainly read": number("raw_mb_s", ".0f", " MB/s"),
            "share": number("share_of_raw_read"),
        },
        "It cannot show another disk.",
        lambda found: [{"files": state, **found[state]} for state in ("warm", "cold")],
    ),
    Section(
        "Hybrid models",
        "hybrids",
        "Do models with convolutions or recurrences gain?",
        lambda found: (
            "As far as their scan allows, which runs over all tokens: "
            + " and ".join(f"{row['speedup']:.1f} times ({row['shape']})" for row in found["rows"])
            + "."
        ),
        lambda found: (
            f"`benchmarks/bench.py hybrids`: models in the table, {found['chunks']} chunks of {found['chunk_tokens']} "
            "tokens, "
            f"{_share(found['ratio'])} recomputed, {found['threads']} threads, median of {found['rounds']}. The "
            "bound is what the scan and the saved FLOPs of the rest allow."
        ),
        {
            "model": text("shape"),
            "full prefill": lambda row: f"{row['stock_ms'] / 1e3:.1f} s",
            "of it scan": lambda row: f"{row['scan_ms'] / 1e3:.1f} s",
            "speed-up": number("speedup", ".2f", " x"),
            "bound": number("bound", ".2f", " x"),
            "slowest tier that pays": number("least_tier_mb_s", ".0f", " MB/s"),
        },
        "It cannot show fused kernels of convolution and scan: with these, what is copied weighs more.",
    ),
    Section(
        "Several sequences behind one prefix",
        "sequences",
        "What do sequences that share a prefix cost?",
        _held,
        lambda found: (
            f"`benchmarks/bench.py sequences`: {_setting(found)}, {found['sequences']} sequences behind "
            f"{found['prefix_tokens']:,} shared tokens."
        ),
        {
            "own tokens": text("tail_tokens"),
            "stock step": number("stock_ms", ".0f", " ms"),
            "static cache": number("static_ms", ".0f", " ms"),
            "shared cells": number("shared_ms", ".0f", " ms"),
            "bytes": megabytes("nbytes"),
            "of stock": megabytes("stock_nbytes"),
        },
        "It cannot show a GPU, whose attention reads shared cells in another way.",
    ),
    Section(
        "Turns of a conversation",
        "session",
        "What does a conversation's kept cache save?",
        lambda found: (
            f"In turn {found['rows'][-1]['turn']} the first token comes {found['rows'][-1]['speedup']:.1f} times "
            f"earlier, {found['rows'][-1]['speedup_with_load']:.1f} times with loading the file."
        ),
        lambda found: f"`benchmarks/bench.py session`: {_setting(found)}.",
        {
            "turn": text("turn"),
            "prompt": number("prompt_tokens", "d", " tokens"),
            "full prefill": number("full_ms", ".0f", " ms"),
            "kept cache": number("kept_ms", ".0f", " ms"),
            "speed-up": number("speedup", ".1f", " x"),
            "with loading": number("speedup_with_load", ".1f", " x"),
        },
        "It cannot show several conversations: both sides keep one.",
        lambda found: found["rows"][1::2],
    ),
    Section(
        "A prompt with images",
        "images",
        "What do stored images save?",
        lambda found: (
            "Most where the vision tower is large: "
            + " and ".join(
                f"{_first(found, family=name, method='ratio 0.15, image-head')['times_faster']:.1f} times ({name})"
                for name in ("qwen2_vl", "llava")
            )
            + "; a first prompt may take longer than stock."
        ),
        lambda found: (
            f"`python benchmarks/images.py`: {found['shape']['images']} images of "
            f"{found['shape']['tokens_per_image']} "
            f"tokens, models of {found['shape']['layers']} layers, {found['machine']['threads']} threads, median of "
            f"{found['shape']['rounds']}."
        ),
        {
            "model": text("family"),
            "images": text("method"),
            "charged": percent("charged_budget"),
            "speed-up": number("times_faster", ".1f", " x"),
            "pixels": lambda row: f"{row['pixel_bytes_per_image'] / 1e3:.0f} kB",
            "stored": lambda row: f"{row['stored_bytes_per_image'] / 1e3:.0f} kB",
        },
        "It cannot show what the tower costs: the charge counts the text model alone.",
    ),
)


def page() -> str:
    """The whole page."""
    written = [one.written(json.loads((RESULTS / f"{one.file}.json").read_text("utf-8"))) for one in SECTIONS]
    return "\n\n".join([HEAD.rstrip(), *written]) + "\n"


def main() -> None:
    """Write docs/measurements.md."""
    (ROOT / "docs" / "measurements.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
