# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a model must show before anything is measured on it: `python benchmarks/reference_model/gates.py`.

Writes benchmarks/results/reference2_gates.json. Every figure is exact match on the same held-out questions, by the
emulation in plain torch; some are asked of the library, too, and must agree. A gate that fails is written as failed.
"""

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from emulate import Emulation, Prompt, at_random, by_key, by_value, encode, is_right
from net import LAYERS, Net
from torch import Tensor, nn
from worlds import CHAINS
from worlds.chains.sampling import Example, sample_examples

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.summary import interval

RATIOS = (0.01, 0.05, 0.1, 0.15, 0.3)
OUTPUT = Path(__file__).parents[1] / "results" / "reference2_gates.json"
Way = Callable[[Emulation, int], Tensor]


def emulated_ways() -> dict[str, Way]:
    """Everything that the emulation is asked, by name; a way is told a prompt and its number."""
    ways: dict[str, Way] = {
        "full prefill": lambda one, number: one.full,
        "full reuse": lambda one, number: one.reuse(),
        "links only": lambda one, number: one.links_only(),
    }
    for last in range(LAYERS):
        ways[f"fresh in layers 0-{last}"] = lambda one, number, last=last: one.fresh_up_to(last)
    for ratio in RATIOS:
        ways[f"kv-deviation:on=v {ratio:.0%}"] = lambda one, number, r=ratio: one.chosen(by_value, r)
    for ratio in (0.05, 0.15):
        ways[f"kv-deviation:on=k {ratio:.0%}"] = lambda one, number, r=ratio: one.chosen(by_key, r)
        ways[f"random {ratio:.0%}"] = lambda one, number, r=ratio: one.chosen(at_random(number), r)
    return ways


def library_ways(prompt: Prompt, number: int) -> dict[str, BlendConfig | None]:
    """What the library is asked, by the names of the emulation."""
    columns = (prompt.links & prompt.reusable).nonzero().flatten().tolist()
    return {
        "full prefill": None,
        "full reuse": BlendConfig(selector="none", recompute_ratio=0.0),
        "links only": BlendConfig(
            selector="explicit", selector_options={"columns": columns}, recompute_ratio=_share(len(columns), prompt)
        ),
        "kv-deviation:on=v 1%": BlendConfig(recompute_ratio=0.01),
        "kv-deviation:on=v 15%": BlendConfig(recompute_ratio=0.15),
        "random 15%": BlendConfig(
            selector="random", selector_options={"free_layers": True}, recompute_ratio=0.15, seed=number
        ),
    }


def _share(count: int, prompt: Prompt) -> float:
    """The ratio at which exactly `count` tokens are chosen; slightly less, since shares are rounded up."""
    return max(0.0, (count - 0.5) / int(prompt.reusable.sum()))


def emulate(model: nn.Module, prompts: Sequence[Prompt], tell: Callable[[int], None]) -> dict[str, list[bool]]:
    """Ask the emulation.

    Args:
        model: gives the weights.
        prompts: the questions.
        tell: receives the number of each prompt.

    Returns:
        For every way which questions it answers rightly.
    """
    net = Net.of({name: weight.float() for name, weight in model.state_dict().items() if "lm_head" not in name})
    ways = emulated_ways()
    found: dict[str, list[bool]] = {name: [] for name in ways}
    for number, prompt in enumerate(prompts):
        tell(number)
        one = Emulation(net, prompt)
        for name, way in ways.items():
            found[name].append(is_right(way(one, number), prompt))
    return found


@torch.no_grad()
def ask_library(
    model: nn.Module,
    tokenizer: Any,
    examples: Sequence[Example],
    prompts: Sequence[Prompt],
    tell: Callable[[int], None],
) -> dict[str, list[bool]]:
    """Ask the library the same questions; the text goes through the tokenizer."""
    found: dict[str, list[bool]] = {}
    for number, (example, prompt) in enumerate(zip(examples, prompts, strict=True)):
        tell(number)
        store = ChunkStore.open("memory://")
        for name, config in library_ways(prompt, number).items():
            cache = BlendCache(model, store, config or BlendConfig())
            inputs = cache.inputs(tokenizer, prefix=None, chunks=list(example.chunks), question=example.question)
            past = None if config is None else cache
            logits = model(**inputs, past_key_values=past, logits_to_keep=1).logits[0, -1]
            found.setdefault(name, []).append(is_right(logits, prompt))
    return found


def row(name: str, rights: Sequence[bool], full: Sequence[bool], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """One line of the table, paired with full prefill."""
    gaps = [float(own) - float(right) for own, right in zip(rights, full, strict=True)]
    depths = sorted({prompt.depth for prompt in prompts})
    low, high = interval(rights)
    gap_low, gap_high = interval(gaps)
    return {
        "method": name,
        "n": len(rights),
        "exact_match": _mean(rights),
        "interval": [low, high],
        "difference_to_full": _mean(gaps),
        "difference_interval": [gap_low, gap_high],
        "by_depth": {
            str(depth): _mean([ok for ok, one in zip(rights, prompts, strict=True) if one.depth == depth])
            for depth in depths
        },
        "crossing": _mean([ok for ok, one in zip(rights, prompts, strict=True) if one.crossings]),
        "local": _mean([ok for ok, one in zip(rights, prompts, strict=True) if not one.crossings]),
    }


def gates(emulated: dict[str, list[bool]], library: dict[str, list[bool]]) -> list[dict[str, Any]]:
    """Every condition with its figure; the conditions were set before the model was trained."""
    score = {name: _mean(rights) for name, rights in emulated.items()}
    full, reuse = score["full prefill"], score["full reuse"]
    deviation = score["kv-deviation:on=v 15%"]
    quarter = LAYERS // 4 - 1  # the last layer of the first quarter
    recovered = (score["links only"] - reuse) / (full - reuse)
    apart = max(abs(_mean(rights) - score[name]) for name, rights in library.items())
    return [
        _gate("full prefill", full, "at least", 0.95),
        _gate("full reuse", reuse, "at most", 0.50),
        _gate(
            f"full prefill minus fresh in layers 0-{quarter} (a quarter of the depth)",
            full - score[f"fresh in layers 0-{quarter}"], "at least", 0.10,
        ),
        _gate(
            f"full prefill minus fresh in layers 0-{quarter + 1} (K and V fresh in one layer more)",
            full - score[f"fresh in layers 0-{quarter + 1}"], "at least", 0.10,
        ),
        _gate("kv-deviation:on=v at 1 % over full prefill", score["kv-deviation:on=v 1%"] / full, "at most", 0.60),
        _gate(
            "kv-deviation:on=v at 15 % minus random at 15 % with the same free layers",
            deviation - score["random 15%"], "at least", 0.20,
        ),
        _gate("share of the gap that the links alone recover", recovered, "at least", 0.90),
        _gate("largest difference of emulation and library", apart, "at most", 0.02),
    ]  # fmt: skip


def _gate(name: str, figure: float, side: str, bound: float) -> dict[str, Any]:
    figure = round(figure, 4)
    holds = figure >= bound if side == "at least" else figure <= bound
    return {"gate": name, "figure": figure, "expected": f"{side} {bound:g}", "holds": holds}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=CHAINS, help="folder of the model")
    parser.add_argument("--count", type=int, default=500, help="held-out questions")
    parser.add_argument("--seed", type=int, default=1, help="which questions")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model)
    examples = sample_examples(options.count, options.seed)
    prompts = [encode(example) for example in examples]
    emulated = emulate(model, prompts, _teller("emulation", len(prompts)))
    library = ask_library(model, tokenizer, examples, prompts, _teller("library", len(prompts)))
    full = emulated["full prefill"]
    document = {
        "settings": {"count": options.count, "seed": options.seed, "split": "heldout"},
        "model": {"parameters": model.num_parameters(), "layers": LAYERS},
        "prompt_tokens": _mean([prompt.ids.shape[1] for prompt in prompts]),
        "chunks": _mean([len(prompt.pieces) for prompt in prompts]),
        "shortest_chunk": min(end - start for prompt in prompts for start, end in prompt.pieces),
        "links_share": _mean([float(prompt.links.sum() / prompt.told.sum()) for prompt in prompts]),
        "crossing_questions": _mean([float(prompt.crossings > 0) for prompt in prompts]),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": {"python": platform.python_version(), "threads": torch.get_num_threads()},
        "gates": gates(emulated, library),
        "emulation": [row(name, rights, full, prompts) for name, rights in emulated.items()],
        "library": [row(name, rights, library["full prefill"], prompts) for name, rights in library.items()],
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    for gate in document["gates"]:
        print(f"{'holds' if gate['holds'] else 'FAILS'}  {gate['gate']}: {gate['figure']} ({gate['expected']})")


def _teller(what: str, count: int) -> Callable[[int], None]:
    def tell(number: int) -> None:
        if number % 50 == 0:
            print(f"{what} {number}/{count}", flush=True)

    return tell


if __name__ == "__main__":
    main()
