# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How well the reference model answers when its chunks are reused: every method on the same held-out questions.

python benchmarks/reference.py --count 500 --output benchmarks/results/reference.json
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from hf_blend import ChunkStore
from hf_blend.evaluation.answering import FULL_PREFILL, FULL_REUSE, Answer, Method, answer, blend_config, is_right
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.world.sampling import Example, pieces_of, sample_examples
from hf_blend.model.fingerprint import fingerprint
from hf_blend.version import __version__

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
SELECTORS = ("kv-deviation:on=k", "kv-deviation:on=v")
CONTROLS, CONTROL_RATIOS = ("boundary", "random"), (0.15, 0.3)  # what every rule must beat at equal cost


@dataclass(frozen=True)
class Line:
    """What one method scored.

    Attributes:
        method: its name.
        nominal_ratio: the share of the reusable tokens that was asked for.
        rights: one per question, in the order of the questions.
        charged_budget: mean over the questions.
        ttft_ms: of each question.
    """

    method: str
    nominal_ratio: float | None
    rights: tuple[bool, ...]
    charged_budget: float | None
    ttft_ms: tuple[float, ...]

    def row(self, full: "Line") -> dict[str, Any]:
        """The figures of a table row, paired with full prefill on the same questions."""
        low, high = interval(self.rights)
        gaps = [float(own) - float(theirs) for own, theirs in zip(self.rights, full.rights, strict=True)]
        gap_low, gap_high = interval(gaps)
        return {
            "method": self.method,
            "nominal_ratio": self.nominal_ratio,
            "charged_budget": self.charged_budget,
            "exact_match": sum(self.rights) / len(self.rights),
            "interval": [low, high],
            "difference_to_full": sum(gaps) / len(gaps),
            "difference_interval": [gap_low, gap_high],
            "n": len(self.rights),
        }


def methods(selectors: Sequence[str], ratios: Sequence[float], check_layers: Sequence[int]) -> list[Method]:
    """Full prefill, full reuse, each selector at each ratio, and the controls.

    Args:
        selectors: names of selectors.
        ratios: recompute ratios.
        check_layers: where tokens are chosen, for the selectors that look at K and V.

    Returns:
        The methods, the two ends of the scale first.
    """
    tried = [(name, ratio) for name in selectors for ratio in ratios]
    tried += [(name, ratio) for name in CONTROLS if name not in selectors for ratio in CONTROL_RATIOS]
    layers = tuple(check_layers)
    blends = [Method(name, blend_config(name, recompute_ratio=r, check_layers=layers)) for name, r in tried]
    return [FULL_PREFILL, FULL_REUSE, *blends]


def score(
    model: nn.Module,
    tokenizer: Any,
    examples: Sequence[Example],
    tried: Sequence[Method],
    progress: Callable[[str], None] | None = None,
) -> list[Line]:
    """Ask every question by every method.

    Args:
        model: the model that answers.
        tokenizer: its tokenizer.
        examples: the questions.
        tried: the methods.
        progress: is told which method is under way.

    Returns:
        One line per method.
    """
    store = ChunkStore.open("memory://")
    lines = []
    for method in tried:
        if progress:
            progress(f"{method.name} {'' if method.config is None else method.config.recompute_ratio}")
        answers = [answer(model, tokenizer, store, method, pieces_of(example)) for example in examples]
        lines.append(_line(method, examples, answers))
    return lines


def _line(method: Method, examples: Sequence[Example], answers: Sequence[Answer]) -> Line:
    rights = tuple(is_right(got.text, example.answer) for got, example in zip(answers, examples, strict=True))
    reports = [got.report for got in answers if got.report is not None]
    charged = sum(report.charged_budget for report in reports) / len(reports) if reports else None
    ratio = None if method.config is None else method.config.recompute_ratio
    return Line(method.name, ratio, rights, charged, tuple(got.ttft_ms for got in answers))


def main(words: Sequence[str] | None = None) -> None:
    """Run the evaluation and write its result file.

    Args:
        words: the command line; None is what was typed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="held-out questions")
    parser.add_argument("--seed", type=int, default=1, help="which questions")
    parser.add_argument("--selectors", nargs="+", default=list(SELECTORS))
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--check-layers", nargs="+", type=int, default=[1])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    chosen = parser.parse_args(words)
    model, tokenizer = load_model()
    examples = sample_examples(chosen.count, chosen.seed)
    tried = methods(chosen.selectors, chosen.ratios, chosen.check_layers)
    lines = score(model, tokenizer, examples, tried, lambda text: _say(f"{text}\n", sys.stderr))
    document = _document(model, chosen, [line.row(lines[0]) for line in lines])
    text = json.dumps(document, indent=2)
    if chosen.output:
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(text + "\n", encoding="utf-8")
    _say(f"{text}\n", sys.stdout)


def _say(text: str, where: TextIO) -> None:
    where.write(text)
    where.flush()


def _document(model: nn.Module, chosen: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import transformers

    settings = {name: value for name, value in vars(chosen).items() if name != "output"}
    versions = {"hf_blend": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    machine = {"python": platform.python_version(), "threads": torch.get_num_threads(), "dtype": str(model.dtype)}
    return {"settings": settings, "model": fingerprint(model), **versions, **machine, "rows": rows}


if __name__ == "__main__":
    main()
