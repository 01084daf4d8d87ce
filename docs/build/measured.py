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

from tables import filled

Document = Mapping[str, Any]
Cell = Callable[[Document], str]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Measurements

Each section asks one question and answers it. The file that it names holds settings, versions and more rows. The first
four sections are about answers, by real models. The others are about time and bytes, mostly by models of random
weights in the proportions of the named one, on two CPU cores that were not always quiet: ratios say more than
milliseconds. No GPU was measured. What did not help is in [benchmarks/LOG.md](../benchmarks/LOG.md).

## How near is a blend to full prefill?

**On SmolLM2, Gemma 3 and Qwen2.5-Coder-0.5B no rule leaves less error than the default. On the 1.5B few are told
apart, and on MuSiQue reuse alone is nearly as good.**

<!--table:robust-->
<!--end-->

The error is the KL divergence from full prefill over the first ten tokens of its answer, as a share of what reuse of
chunks behind BOS alone leaves, with its 95 % interval. A star: the rule beats tokens at random at the same charge. In
the first column the default does not; there a few prompts on which the model wavers between two answers hold most of
the mean.

Prompts have six passages, of which one holds the answer; weights are float32, those of the 1.5B bfloat16. Prompts,
rules and charges were fixed before the run. Not measured: larger models, other languages, code. File:
[robust.json](../benchmarks/results/robust.json), also with charges of 5 and 10 %.

Over the charge, with ten passages ([frontier.json](../benchmarks/results/frontier.json)):

![SmolLM2: what is left against the charge](pictures/frontier-smollm2.svg)

![Gemma 3: what is left against the charge](pictures/frontier-gemma3.svg)

A better choice could bring more: a search that knows the answer leaves a third to three fifths of what `ramp` leaves,
at a charge of 10 % on twelve prompts of 240 tokens
([frontier_limit.json](../benchmarks/results/frontier_limit.json)).

## Do the answers come back?

**On the larger model most come back by full reuse alone, because chunks are computed behind a short text. Recomputing
10 % brings no more that can be told. About one answer in seven stays lost.**

<!--table:real_answers-->
<!--end-->

In which year was one of six persons born, of whom the prompt has a passage each? Right answers, with 95 % intervals
over persons; chance is 0.18. Not measured: free answers. File:
[real_answers.json](../benchmarks/results/real_answers.json).

## Do scores hold?

**On 2WikiMQA the rules cannot be told from full prefill, and full reuse is worse. On SAMSum the scores speak against
blending: full reuse scores more than full prefill, and both rules less.**

<!--table:scored-->
<!--end-->

SmolLM2-135M, chunks behind BOS alone: error, and behind each score (F1, ROUGE-L) the interval of its difference to
full prefill's. A model of this size summarises badly, and n = 20 is few. File:
[real_selectors.json](../benchmarks/results/real_selectors.json), also with other rules.

## Does calibration choose well?

**Mostly: at worst the choice leaves 1.11 times what the best of its three rules leaves.**

<!--table:calibrated-->
<!--end-->

Each model was calibrated as if its family had not been measured, and checked on the prompts of the first table. File:
[calibrated.json](../benchmarks/results/calibrated.json).
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
    columns: Mapping[str, Cell]  # none where the verdict says it all
    not_measured: str
    rows: Callable[[Document], Sequence[Document]] = every_row
    behind: str = ""

    def written(self, document: Document) -> str:
        """The section as Markdown."""
        parts = [f"## {self.title}", f"{self.question} **{self.verdict(document)}**"]
        if self.columns:
            lines = [f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
            lines += [f"| {' | '.join(cell(row) for cell in self.columns.values())} |" for row in self.rows(document)]
            parts.append("\n".join(lines))
        parts += [self.behind] if self.behind else []
        link = f"[{self.file}.json](../benchmarks/results/{self.file}.json)"
        last = " ".join(filter(None, (self.how(document), self.not_measured, f"File: {link}.")))
        return "\n\n".join([*parts, last])


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


def _threads(document: Document) -> str:
    return "one thread" if document["threads"] == 1 else f"{document['threads']} threads"


def _setting(document: Document) -> str:
    """The model, and how often something was measured."""
    given = {**document.get("machine", {}), **document}
    return f"{given['shape']}, {given['dtype']}, {_threads(given)}, median of {given['rounds']}"


def _longest(document: Document) -> Document:
    """The longest prompt, blended by `boundary` at 15 %."""
    rows = [row for row in document["rows"] if row["method"] == "boundary@0.15"]
    return max(rows, key=lambda row: int(row["prompt_tokens"]))


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
    return f"In {right} of {count} cases, all but these; in {refuted} the rounds refute it."


EXTEND = "Self-Extend"
STORED_OR_NOT = ("ratio 0.15, image-head", "ratio 0.15, nothing stored")
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


FIRST_TOKEN: Mapping[str, Cell] = {
    "recomputed": lambda row: f"{100 * row['ratio']:.1f} %",
    "charged": lambda row: f"{100 * row['charged_budget']:.1f} %",
    "first token": lambda row: f"{row['ttft_ms'] / 1e3:.2f} s",
    "speed-up": number("speedup", ".2f", " x"),
    "FLOP bound": number("flop_bound", ".2f", " x"),
}


def _first_token(
    title: str,
    result: str,
    question: str,
    ratio: float,
    columns: Mapping[str, Cell] | None = None,
    behind: str = "",
) -> Section:
    """What `hf-blend bench ttft` measured, with the verdict at a ratio."""
    return Section(
        title,
        result,
        question,
        lambda found: (
            f"At a charge of {_share(_first(found, ratio=ratio)['charged_budget'])} "
            f"{_first(found, ratio=ratio)['speedup']:.1f} times, "
            f"{_share(_first(found, ratio=ratio)['bound_share'])} of the speed-up that the saved FLOPs allow."
        ),
        lambda found: (
            f"`hf-blend bench ttft`: {_setting(found['machine'])}, a prompt of "
            f"{found['rows'][0]['prompt_tokens']:,} tokens, "
            f"every chunk in memory; full prefill takes {found['full']['ttft_ms'] / 1e3:.2f} s."
        ),
        columns or {},
        "",
        behind=behind,
    )


SECTIONS = (
    _first_token(
        "Time to the first token",
        "ttft",
        "How much earlier is the first token of a long prompt?",
        0.15,
        FIRST_TOKEN,
        behind="![First token against cost](pictures/speed.svg)",
    ),
    _first_token("At 2,000 tokens", "ttft_2000", "How much earlier is it in a prompt of usual length?", 0.095),
    Section(
        "Beside llama.cpp",
        "llama_cpp",
        "Is a blend on a CPU earlier than llama.cpp on the same weights?",
        _against_llama,
        lambda found: (
            "`benchmarks/llama_cpp.py`: SmolLM2-135M-Instruct, in float32 but for llama.cpp, CPU seconds of "
            f"{found['settings']['threads']} thread with AVX-512, median of {found['settings']['rounds']}, chunks in "
            "memory; x: times as early as Q8_0."
        ),
        {"way": text("way"), "about 1,000 tokens": text("short"), "about 2,000 tokens": text("long")},
        "Not measured: larger models, llama.cpp's reuse of exact prefixes.",
        _ways,
    ),
    Section(
        "Short prompts",
        "break_even",
        "From which length on does blending pay?",
        lambda found: (
            f"From about {min(found['break_even_tokens'].values())} tokens on, and {_longest(found)['speedup']:.1f} "
            f"times at {_longest(found)['prompt_tokens']} tokens, with `boundary` at 15 %."
        ),
        lambda found: f"`hf-blend bench break-even`: {_setting(found['machine'])}, every chunk in memory.",
        {},
        "Thin models pay later.",
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
        {},
        "On a GPU growing a `DynamicCache` costs less.",
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
        {},
        "",
    ),
    Section(
        "Looking at fewer blocks while decoding",
        "sparse_decode",
        "Is decoding over selected blocks faster?",
        lambda found: (
            f"At 32,768 tokens {_first(found, context=32768, way='0.25 locked')['vs_dense']:.2f} times with a "
            "quarter of the "
            f"blocks, at 4,096 {_first(found, context=4096, way='0.25 locked')['vs_dense']:.2f} times, if the "
            "selection is held over steps. Selecting again in every step costs most of it."
        ),
        lambda found: f"`benchmarks/bench.py sparse-decode`: {_setting(found)}.",
        {},
        "Not measured: text; random K and V are attended to evenly.",
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
        {},
        "Not measured: a cold disk; text.",
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
            f"{found['layers']} layers whose heads agree, {_threads(found)}, median of {found['rounds']}. "
            "Loading whole chunks is hidden behind computing."
        ),
        {},
        "`benchmarks/reproduce.py impress --model M` measures yours.",
    ),
    Section(
        "Less of K and V, on a real model",
        "real_decoding",
        "How far off are answers where K and V are in few bits, or only a part is looked at or loaded?",
        _less,
        lambda found: (
            f"`benchmarks/real_context.py decoding`: {found['settings']['model']}, float32, prompts of HotpotQA, n = "
            f"{found['rows'][0]['n']}, `sparse` in blocks of {found['settings']['block_tokens']} tokens. Same tokens: "
            "how often the first choice is full prefill's; with the default blend it is "
            f"{_share(_first(found, way='blend')['same'])}."
        ),
        {
            "way": lambda row: WAYS[row["way"]][0],
            "of K and V": percent("share"),
            "KL, ten tokens": with_interval("kl", ".4f"),
            "beside": lambda row: WAYS[row["way"]][1],
            "same tokens": percent("same"),
        },
        "Not measured: long answers, in which a small error may grow.",
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
            f"{found['rows'][0]['n']}; perplexity behind the window."
        ),
        {},
        "Not measured: texts beyond the trained length.",
    ),
    Section(
        "Where chunks are kept",
        "store_plan",
        "Does `hf-blend store plan` choose the best device?",
        _planned,
        lambda found: (
            f"`benchmarks/bench.py store-plan`: {found['chunks']} chunks of "
            f"{found['chunk_tokens']} "
            f"tokens, {_threads(found)}, median of {found['rounds']}. With chunks of half the length: "
            "[store_plan_small.json](../benchmarks/results/store_plan_small.json)."
        ),
        {
            "model": text("shape"),
            "recomputed": percent("ratio"),
            "chosen": text("chosen"),
            "best": text("best"),
        },
        "Tiers are throttled to a rate; a real network was not measured.",
        lambda found: [row for row in found["rows"] if row["chosen"] != row["best"]],
    ),
    Section(
        "Loading beside computing",
        "ttft_disk_spare",
        "Does loading hide behind computing?",
        _hidden,
        lambda found: f"`benchmarks/bench.py ttft-disk`: {_setting(found['machine'])}, one core to spare.",
        {},
        "With no core to spare [they cost each other](../benchmarks/results/ttft_disk.json).",
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
        {},
        "",
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
            f"`benchmarks/bench.py store`: {_threads(found)}, median of {found['plan']['rounds']}. "
            f"A store of {found['open_entries']:,} entries opens in {found['open_s']:.2f} s; with full "
            f"durability it writes {found['put_mb_s']:.0f} MB/s."
        ),
        {},
        "",
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
            f"`benchmarks/bench.py hybrids`: {found['chunks']} chunks of {found['chunk_tokens']} "
            "tokens, "
            f"{_share(found['ratio'])} recomputed, {_threads(found)}, median of {found['rounds']}."
        ),
        {},
        "Not measured: fused kernels, beside which copies weigh more.",
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
        {},
        "",
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
        {},
        "",
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
            f"`benchmarks/images.py`: {found['shape']['images']} images of "
            f"{found['shape']['tokens_per_image']} "
            f"tokens, models of {found['shape']['layers']} layers, {_threads(found['machine'])}, median of "
            f"{found['shape']['rounds']}."
        ),
        {
            "model": text("family"),
            "images": text("method"),
            "charged": percent("charged_budget"),
            "speed-up": number("times_faster", ".1f", " x"),
            "stored": lambda row: f"{row['stored_bytes_per_image'] / 1e3:.0f} kB",
        },
        "The charge counts the text model alone.",
        lambda found: [row for row in found["rows"] if row["method"] in STORED_OR_NOT],
    ),
)


def page() -> str:
    """The whole page."""
    written = [one.written(json.loads((RESULTS / f"{one.file}.json").read_text("utf-8"))) for one in SECTIONS]
    return "\n\n".join([filled(HEAD, RESULTS).rstrip(), *written]) + "\n"


def main() -> None:
    """Write docs/measurements.md."""
    (ROOT / "docs" / "measurements.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
