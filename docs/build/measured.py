# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page docs/measurements.md, written from the committed results: a section begins with what was found.

python docs/build/measured.py
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tables import filled

Document = Mapping[str, Any]
Cell = Callable[[Document], str]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Measurements

Each section begins with what was found; the linked file has settings, versions and more rows. If no model is named,
it is SmolLM2-135M in float32, mostly with random weights, on one or two threads. Times are medians: trust their
ratios more. No GPU was measured. What did not help is in [benchmarks/LOG.md](../benchmarks/LOG.md).

## How near is a blend to full prefill?

<!--table:regime-->
<!--end-->

Prompts have chunks of some 540 tokens in the model's chat template.

* *Error*: the KL divergence from full prefill, as a mean over the tokens of full prefill's answer (at most 20),
  divided by that of full reuse. So 0 is full prefill and 1 is full reuse. Intervals are of 95 %.
* *Geometric*: the geometric mean of the errors of single prompts.
* *Worse*: on how many prompts the error is larger than that of full reuse.
* *Right, kept*: how many answers are right, and how many of full prefill's right answers stay right. On 2WikiMultihop
  the 1.5B is right more often with full reuse than with full prefill: a blend is near full prefill, right or wrong.

Weights of the 1.5B are bfloat16, those of others float32; times are CPU seconds of one thread. The default rule was
chosen on ten other prompts of MuSiQue.
[regime.json](../benchmarks/results/regime.json)

## With short passages

**On SmolLM2 the default rule, `stored-importance`, has as small an error as the rule `expected-error`, which computes
more.
On Gemma 3 its error is smaller. It was not run on Qwen2.5. On Qwen2.5-Coder-1.5B most rules are not measurably better
than choosing at random, and on MuSiQue full reuse is nearly as good as `expected-error`.**

<!--table:robust-->
<!--end-->

The error is over the first ten tokens of full prefill's answer; rules cost 15 %. Here 1 is full reuse of chunks that
were computed after BOS alone. A star: the rule beats random tokens. In the first row `expected-error` does not beat
them: its mean error comes mostly from a few prompts on which the model wavers between two
answers.

Prompts have six passages, of which one holds the answer. Weights are float32 (1.5B: bfloat16). Prompts,
rules and costs were fixed before the run. Not measured: larger models, other languages, code.
[robust.json](../benchmarks/results/robust.json)

## Do the answers come back?

**On the larger model full reuse keeps most answers, because chunks are computed after a short text. Recomputing 10 %
adds nothing measurable. About one answer in seven stays lost.**

<!--table:real_answers-->
<!--end-->

The prompt has a passage about each of six persons, and asks in which year one of them was born. The table has the
share of right answers, with 95 % intervals; guessing gives 0.18. Not measured: free-form answers.
[real_answers.json](../benchmarks/results/real_answers.json)

## Do scores hold?

**On 2WikiMQA the rules score like full prefill, within the intervals, and full reuse scores less. On SAMSum the scores
speak against blending: full reuse scores more than full prefill, and both rules that were tried score less.**

SmolLM2-135M, chunks after BOS alone; F1 of only 40 answers, ROUGE-L of only 20 summaries.
[real_selectors.json](../benchmarks/results/real_selectors.json)
"""


def every_row(document: Document) -> Sequence[Document]:
    """All rows of a document."""
    rows: Sequence[Document] = document["rows"]
    return rows


@dataclass(frozen=True)
class Section:
    """What was found about one question, and how."""

    title: str
    file: str
    verdict: Callable[[Document], str]
    how: Callable[[Document], str]
    note: str = ""  # what was not measured, or differs elsewhere
    columns: Mapping[str, Cell] = field(default_factory=dict)  # none where the verdict says it all
    rows: Callable[[Document], Sequence[Document]] = every_row

    def written(self, document: Document) -> str:
        """The section as Markdown."""
        parts = [f"## {self.title}", f"**{self.verdict(document)}**"]
        if self.columns:
            lines = [f"|{'|'.join(self.columns)}|", "|" + "---|" * len(self.columns)]
            lines += [f"|{'|'.join(cell(row) for cell in self.columns.values())}|" for row in self.rows(document)]
            parts.append("\n".join(lines))
        link = f"[{self.file}.json](../benchmarks/results/{self.file}.json)"
        return "\n\n".join([*parts, f"{link}, {self.how(document)} {self.note}".rstrip()])


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


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _first(document: Document, **known: Any) -> Document:
    """The first row with these values."""
    return next(row for row in document["rows"] if all(row.get(name) == value for name, value in known.items()))


def _refused_calls(row: Document) -> str:
    """How many calls of `generate` a cache refused by name."""
    return str(sum(calls for what, calls in row["calls"].items() if what.startswith("refused")))


def _of_shape(document: Document) -> str:
    """Which model was measured, where it is not SmolLM2."""
    shape = {**document.get("machine", {}), **document}["shape"]
    return "" if shape in ("smollm2-135m", "model:smollm2") else f" with the shape {shape}"


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
        f"At {' and '.join(format(row['tokens'], ',') for row in blends)} tokens the first token of a blend at 15 % "
        f"comes {ratios} times as fast as that of llama.cpp's full prefill with 8-bit weights. The blend is less "
        "exact."
    )


EXTEND = "Self-Extend"
WAYS = {  # of docs/holding_less.md: in the result file, and on the page
    "kv_bits 8": "`kv_bits=8`",
    "kv_bits 4": "`kv_bits=4`",
    "partial 0.25": "`partial=0.25`",
    "gsa 0.25": "`sparse=0.25`",
    "kvstar 0.25": "the same, method `kvstar`",
    "random 0.25": "the same, method `random`",
}


def _less(document: Document) -> str:
    few, quarter, loaded = (_first(document, way=way) for way in ("kv_bits 4", "gsa 0.25", "partial 0.25"))
    return (
        f"Next-token distributions change by {few['kl']:.4f} nats with 4 bits, by {quarter['kl']:.3f} with a quarter "
        f"of the blocks in each step, and by {loaded['kl']:.3f} with {_share(loaded['share'])} of the bytes loaded. "
        "The blend itself is "
        f"{_first(document, way='blend')['kl_full']:.3f} off full prefill."
    )


def _beyond(document: Document) -> str:
    shifted, cut, extended = (
        _share(_first(document, way=way)["times"] - 1)
        for way in ("ShiftCache", "the newer half prefilled again", EXTEND)
    )
    return (
        f"`ShiftCache` raises perplexity by {shifted} and computes nothing again. Prefilling the newer half again "
        f"raises it by {cut}; Self-Extend, which keeps all of K and V, by {extended}."
    )


FIRST_TOKEN: Mapping[str, Cell] = {
    "recomputed": lambda row: f"{100 * row['ratio']:.1f} %",
    "cost": lambda row: f"{100 * row['charged_budget']:.1f} %",
    "first token": lambda row: f"{row['ttft_ms'] / 1e3:.2f} s",
    "speed-up": number("speedup", ".2f", " x"),
    "FLOP bound": number("flop_bound", ".2f", " x"),
}


def _first_token(title: str, result: str, ratio: float, columns: Mapping[str, Cell] | None = None) -> Section:
    """What `hf-blend bench ttft` measured, with the verdict at a ratio."""
    return Section(
        title,
        result,
        lambda found: (
            f"At {found['rows'][0]['prompt_tokens']:,} tokens and a cost of "
            f"{_share(_first(found, ratio=ratio)['charged_budget'])} the first token comes "
            f"{_first(found, ratio=ratio)['speedup']:.1f} times as fast; by FLOPs alone it could be "
            f"{_first(found, ratio=ratio)['flop_bound']:.1f} times."
        ),
        lambda found: (
            f"`hf-blend bench ttft`{_of_shape(found['machine'])}; full prefill takes "
            f"{found['full']['ttft_ms'] / 1e3:.2f} s."
        ),
        columns=columns or {},
    )


SECTIONS = (
    _first_token("Time to the first token", "ttft", 0.15, FIRST_TOKEN),
    Section(
        "Beside llama.cpp",
        "llama_cpp",
        _against_llama,
        lambda found: (
            "`benchmarks/llama_cpp.py`: SmolLM2-135M-Instruct, CPU seconds of "
            f"{found['settings']['threads']} thread with AVX-512; x: times as fast as Q8_0."
        ),
        "Not measured: larger models, llama.cpp's reuse of exact prefixes.",
        {"way": text("way"), "about 1,000 tokens": text("short"), "about 2,000 tokens": text("long")},
        _ways,
    ),
    Section(
        "transformers' own tests",
        "stock_tests",
        lambda found: (
            f"Of {_first(found, cache='stock')['passed']} tests of generation and caches in seven families, "
            f"{_first(found, cache='BlendCache')['passed']} pass with a `BlendCache`."
        ),
        lambda found: (
            f"`benchmarks/stock_tests.py`, transformers {found['transformers']}. The others call a plain "
            "`generate` on a filled cache, which is refused with the reason; two expect transformers' own class of "
            "layer. `SequenceCache` "
            f"refuses {_refused_calls(_first(found, cache='SequenceCache'))} calls by name, mostly of batches."
        ),
    ),
    Section(
        "Short prompts",
        "break_even",
        lambda found: (
            f"Blending pays from about {min(found['break_even_tokens'].values())} tokens on. At "
            f"{_longest(found)['prompt_tokens']} tokens it is {_longest(found)['speedup']:.1f} times as fast, with "
            "`boundary` at 15 %."
        ),
        lambda found: f"`benchmarks/bench.py break-even`{_of_shape(found['machine'])}.",
    ),
    Section(
        "Decoding",
        "decode",
        lambda found: (
            f"Behind {found['rows'][-1]['context']:,} tokens decoding is {found['rows'][-1]['vs_dynamic']:.2f} times "
            f"as fast as with a `DynamicCache`, and {found['rows'][-1]['vs_static']:.2f} times as fast as with a "
            "`StaticCache`."
        ),
        lambda found: f"`benchmarks/bench.py decode`{_of_shape(found)}.",
    ),
    Section(
        "Less of K and V, on a real model",
        "real_decoding",
        _less,
        lambda found: (
            f"`benchmarks/real_context.py decoding`: {found['settings']['model']}, prompts of HotpotQA, n = "
            f"{found['rows'][0]['n']}. KL of `sparse` (blocks of {found['settings']['block_tokens']} tokens) is from "
            "full prefill, that of the others from the blend. Same tokens: how often the first choice is full "
            f"prefill's; with the default blend it is {_share(_first(found, way='blend')['same'])}."
        ),
        "Not measured: long answers, in which a small error may grow.",
        {
            "way": lambda row: WAYS[row["way"]],
            "of K and V": percent("share"),
            "KL, ten tokens": with_interval("kl", ".4f"),
            "same tokens": percent("same"),
        },
        lambda found: [_first(found, way=way) for way in WAYS],
    ),
    Section(
        "Beyond a window",
        "real_window",
        _beyond,
        lambda found: (
            f"`benchmarks/real_context.py window`: {found['settings']['model']}, {found['settings']['read_tokens']} "
            f"tokens of Wikipedia, a window of {found['settings']['window_tokens']}, n = {found['rows'][0]['n']}; "
            "perplexity beyond the window."
        ),
        "Not measured: texts beyond the trained length.",
    ),
)


def page() -> str:
    """The whole page."""
    written = [
        section.written(json.loads((RESULTS / f"{section.file}.json").read_text("utf-8"))) for section in SECTIONS
    ]
    return "\n\n".join([filled(HEAD, RESULTS).rstrip(), *written]) + "\n"


def main() -> None:
    """Write docs/measurements.md."""
    (ROOT / "docs" / "measurements.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
