# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The model cards, written from the committed results: one for each recipe on a model.

python docs/build/cards.py
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from tables import first_task, load_result, robust_rows

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "model_cards"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
LIMITS = """## Limits

One small model and one data set: what holds for them need not hold for yours. `hf-blend tune --prompts mine.jsonl`
measures your model on your prompts."""


@dataclass(frozen=True)
class Recipe:
    """A way to blend whose figures are committed."""

    selector: str
    target: float
    about: str
    is_behind_text: bool = True  # its chunks are computed behind the short text, as is the default; else BOS alone
    result: str = "real_selectors"  # the file of its figures

    @property
    def name(self) -> str:
        """The card's name."""
        return f"smollm2-{self.selector}"


RECIPES = (
    Recipe(
        "expected-error",
        0.15,
        "The tokens that the question attends to most, and that are likely to be wrong by their place.",
        result="robust",
    ),
    Recipe("ramp", 0.15, "Tokens near the head of a chunk, and more of them in chunks with more before them."),
    Recipe("boundary", 0.05, "The first tokens of each chunk, chosen without looking at the question or the states."),
    Recipe(
        "kv-deviation",
        0.15,
        "CacheBlend's rule as published: the tokens whose K and V at layer 1 differ most; chunks after BOS alone.",
        is_behind_text=False,
    ),
)


def recipe_card(recipe: Recipe) -> str:
    """Write the card of a recipe."""
    document = load_result(recipe.result)
    measured = f"{recipe.selector}@text" if recipe.is_behind_text else recipe.selector
    rows = first_task(document) if recipe.result == "real_selectors" else _robust(document)
    own = {target: row for (name, target), row in sorted(rows.items()) if name == measured}
    prefix = "" if recipe.is_behind_text else ", chunk_prefix_ids=bos"
    shown, (low, high) = own[recipe.target], document["settings"]["tokens"]
    return "\n".join([
        f"---\n{_data(recipe, shown).to_yaml()}\n---\n",
        f"# Recipe `{recipe.selector}` on SmolLM2-135M-Instruct\n",
        f"{recipe.about} Written by `docs/build/cards.py` from "
        f"[{recipe.result}.json](../benchmarks/results/{recipe.result}.json).\n",
        f"n = {shown['n']} prompts of {shown['task']}, {low:,} to {high:,} tokens. *Error* is how far "
        "next-token distributions are from full prefill's (KL divergence): 0 is full prefill, 1 is full reuse of "
        "chunks after BOS alone; with 95 % intervals. *Ratio* is the share of the reusable tokens that is "
        "recomputed, *cost* all work on them as a share of a full prefill's.\n",
        "| ratio | cost | error | first token |\n|---|---|---|---|",
        *(_line(row) for row in own.values()),
        "\n## How to use it\n",
        '```python\nfrom hf_blend import BlendCache, ChunkStore\n\nstore = ChunkStore.open("kv-store")',
        *(["bos = [tokenizer.bos_token_id]"] if prefix else []),
        f'cache = BlendCache(model, store, selector="{recipe.selector}", '
        f"recompute_ratio={shown['ratio']:.2f}{prefix})\n```\n",
        "All other settings of `BlendConfig` are the defaults.\n",
        f"{LIMITS}\n",
    ])  # fmt: skip


def _robust(document: dict[str, Any]) -> dict[tuple[str, float], dict[str, Any]]:
    rows = robust_rows(document)["smollm2", "hotpotqa"]
    return {key: {**row, "speedup": row["ttft_x"]} for key, row in rows.items()}


def _line(row: dict[str, Any]) -> str:
    left = f"{row['kl']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
    return f"| {row['ratio']:.1%} | {row['charged']:.1%} | {left} | {row['speedup']:.1f} x as fast |"


def _data(recipe: Recipe, shown: dict[str, Any]) -> ModelCardData:
    result = EvalResult(
        task_type="text-generation", dataset_type=shown["task"], dataset_name=shown["task"], metric_type="kl",
        metric_name=f"share of full reuse's KL divergence that is left, charged {shown['charged']:.2f}",
        metric_value=round(shown["kl"], 3), metric_args={"questions": shown["n"]},
    )  # fmt: skip
    return ModelCardData(
        language="en", license="apache-2.0", library_name="transformers", pipeline_tag="text-generation",
        tags=["hf_blend", "kv-cache", "rag", "cacheblend"], metrics=["kl"], base_model=BASE, model_name=recipe.name,
        eval_results=[result],
    )  # fmt: skip


def main() -> None:
    """Write the cards."""
    FOLDER.mkdir(exist_ok=True)
    for recipe in RECIPES:
        (FOLDER / f"{recipe.name}.md").write_text(recipe_card(recipe), encoding="utf-8")


if __name__ == "__main__":
    main()
