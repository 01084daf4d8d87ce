# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How little of full reuse's error a choice of tokens can leave: a greedy search by the true divergence.

    python benchmarks/frontier_limit.py run --model smollm2 --task musique --data musique.jsonl
    python benchmarks/frontier_limit.py table

Prompts of six passages, cut to a few words. Tokens are recomputed in groups of neighbours, through the library. A
round adds the group behind which the mean divergence over full prefill's answer is least: the first tries all groups,
the others four that brought most when they were last tried. So the choice knows the answer, which no rule does; a
search that looks at several groups at a time may find less. `ramp` and random tokens stand beside it, at as many
tokens. A line is kept for each prompt, way and share; `run` continues where it stopped.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_selectors import TEXT, Bench, Task, command_line, read_prompts

from hf_blend import BlendCache, ChunkStore

SHARES = (0.0, 0.05, 0.1, 0.15, 0.3)  # of the reusable tokens, that are recomputed
PASSAGES, WORDS, GROUP = 6, 26, 6  # passages, words of each, neighbours that are recomputed together
TRIED = 4  # groups that are tried in a later round
SINGLE = 0.15  # share behind which a round adds two groups
SKIPPED = 132  # rows before: measured, or something was chosen on them
ALONE = "bos"  # chunks behind BOS alone, the other ways are behind the text
Line = dict[str, Any]


def cut(row: Line) -> Line:
    """Keep the beginnings of the first passages."""
    chunks = [" ".join(chunk.split()[:WORDS]) for chunk in row["chunks"][:PASSAGES]]
    return {**row, "chunks": list(dict.fromkeys(chunks))}


class Search:
    """One prompt, with its chunks as they are stored in one way."""

    def __init__(self, bench: Bench, row: Line, way: str) -> None:
        cache = BlendCache(bench.model, ChunkStore.open("memory://"))
        self._bench, self._row = bench, row
        self._answer, self._full, _ = bench.full(bench.inputs(cache, row)["input_ids"])
        self._context = "" if way == ALONE else TEXT
        self._store = ChunkStore.open("memory://")
        [prompt] = cache.prompts.pending.batch.prompts
        places = [(span.start, span.start + span.tokens) for span in prompt.spans()]
        self.tokens = sum(stop - start for start, stop in places)
        self._groups = [
            list(range(at, min(at + GROUP, stop))) for start, stop in places for at in range(start, stop, GROUP)
        ]

    def left(self, selector: str, tokens: int, **options: Any) -> Line:
        """The divergence where so many tokens are recomputed, in nats."""
        settings = {"recompute_ratio": tokens / self.tokens, "selector": selector, "selector_options": options}
        found, _, report, _ = self._bench.blended(self._row, self._answer, self._store, self._context, settings)
        kl = (self._full.exp() * (self._full - found)).sum(-1)
        return {"kl": float(kl.mean()), "kl_first": float(kl[0]), "charged": report.charged_budget}

    def named(self, columns: list[int]) -> Line:
        """The divergence where these columns are recomputed."""
        return self.left("explicit", len(columns), columns=columns)

    def greedy(self) -> Iterator[tuple[int, Line]]:
        """The least that was found, and how many tokens it recomputes, at each share."""
        found, chosen = self.left("none", 0), list[int]()
        gains = dict.fromkeys(range(len(self._groups)), float("inf"))
        for share in SHARES:
            while gains and len(chosen) < round(share * self.tokens):
                most = sorted(gains, key=lambda one: -gains[one])[: TRIED if chosen else None]
                tried = {one: self.named(chosen + self._groups[one]) for one in most}
                gains |= {one: found["kl"] - line["kl"] for one, line in tried.items()}
                best, *others = sorted(tried, key=lambda one: tried[one]["kl"])
                found, chosen = tried[best], chosen + self._groups[best]
                del gains[best]
                if share > SINGLE and others:
                    chosen += self._groups[others[0]]
                    found = self.named(chosen)
                    del gains[others[0]]
            yield len(chosen), found


def measured(bench: Bench, row: Line, way: str) -> Iterator[Line]:
    """All lines of a prompt and a way."""
    search = Search(bench, row, way)
    search.left("none", 0)  # stores the chunks
    if way == ALONE:
        yield {"rule": "none", "share": 0.0, **search.left("none", 0)}
        return
    for share, (tokens, found) in zip(SHARES, search.greedy(), strict=True):
        own = {"share": share, "tokens": search.tokens, "recomputed": tokens}
        yield {"rule": "greedy", **own, **found}
        for rule in ("ramp", "random") if tokens else ():
            yield {"rule": rule, **own, **search.left(rule, tokens)}


def run(asked: argparse.Namespace) -> None:
    """Measure what is not yet in the file."""
    bench = Bench(asked.model, {}, Task())
    path = asked.rows / f"{bench.name}-{asked.task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    done = {(line["id"], line["way"]) for line in map(json.loads, lines)}
    rows = [row for row in map(cut, read_prompts(asked.data)[SKIPPED:]) if len(row["chunks"]) == PASSAGES]
    with path.open("a", encoding="utf-8") as file:
        for row in rows[: asked.limit]:
            for way in (ALONE, TEXT):
                if (row["id"], way) not in done:
                    found = [{"id": row["id"], "way": way, **line} for line in measured(bench, row, way)]
                    file.writelines(json.dumps(line) + "\n" for line in found)
                    file.flush()


def table(asked: argparse.Namespace) -> None:
    """Write shares of the divergence of full reuse, chunks behind BOS alone, by model, task, way, rule and share."""
    rows = []
    for path in sorted(asked.rows.glob("*.jsonl")):
        model, _, task = path.stem.rpartition("-")
        found = defaultdict[tuple[str, str, float], dict[str, Line]](dict)
        for line in map(json.loads, path.read_text("utf-8").splitlines()):
            found[line["way"], line["rule"], line["share"]][line["id"]] = line
        reuse = found.pop((ALONE, "none", 0.0))
        for (way, rule, share), own in found.items():
            row: Line = {"model": model, "task": task, "way": way, "rule": rule, "share": share, "n": len(own)}
            for key, suffix in (("kl", ""), ("kl_first", "_first")):
                pairs = np.array([(line[key], reuse[name][key]) for name, line in own.items()])
                drawn = pairs[np.random.default_rng(0).integers(len(pairs), size=(4000, len(pairs)))].sum(1)
                low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
                shares = {key: pairs[:, 0].sum() / pairs[:, 1].sum(), f"low{suffix}": low, f"high{suffix}": high}
                row |= {name: round(float(value), 4) for name, value in shares.items()}
            for key in ("charged", "tokens", "recomputed"):
                row[key] = round(statistics.fmean(line[key] for line in own.values()), 4)
            rows.append(row)
            print(" ".join(f"{name} {value}" for name, value in row.items()))
    settings = {"passages": PASSAGES, "words": WORDS, "group": GROUP, "tried": TRIED, "torch": torch.__version__}
    text = ",\n".join("  " + json.dumps(row) for row in rows)
    asked.output.write_text(f'{{"settings": {json.dumps(settings)},\n"rows": [\n{text}\n]}}\n', "utf-8")


def main() -> None:
    """Read the command line."""
    parser, measure, _ = command_line(__doc__, "frontier_limit", run, table)
    measure.add_argument("--task", required=True)
    measure.add_argument("--data", type=Path, required=True)
    measure.add_argument("--limit", type=int, default=12)
    asked = parser.parse_args()
    asked.do(asked)


if __name__ == "__main__":
    main()
