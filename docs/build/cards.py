# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The model cards, written from the committed results: one for each recipe, and the head of the model's own.

python docs/build/cards.py
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

ROOT = Path(__file__).resolve().parents[2]
FOLDER, RESULTS = ROOT / "model_cards", ROOT / "benchmarks" / "results"
REPOSITORY_TAGS = ["hf_blend", "kv-cache", "rag", "cacheblend"]
WORLD: dict[str, Any] = {
    "dataset_type": "hf_blend/reference-world",
    "dataset_name": "reference world, held-out questions",
}
CHAIN_WORLD: dict[str, Any] = {
    "dataset_type": "hf_blend/chain-world",
    "dataset_name": "chain world, held-out questions",
}
MODELS = {  # name of the card → title, result file, world
    "reference": ("hf_blend reference model", "reference", WORLD),
    "chains": ("hf_blend chain model", "reference2_gates", CHAIN_WORLD),
}
GATES_PLACE = re.compile(r"(<!--gates-->).*?(<!--end-->)", re.DOTALL)
LIMITS = """## Limits

The model is a measuring instrument of 1.2 M parameters with a world of 298 words ([card](reference.md)). What holds
for it need not hold for large models: measure yours with `hf-blend tune`."""


@dataclass(frozen=True)
class Recipe:
    """A way to blend whose scores are committed."""

    name: str
    selector: str
    shown_ratio: float
    result: str
    about: str


RECIPES = (
    Recipe(
        "reference-kv-deviation", "kv-deviation:on=k", 0.15, "reference",
        "CacheBlend's rule: the tokens whose keys at layer 1 are furthest from the stored ones are recomputed.",
    ),
    Recipe(
        "reference-auto", "auto", 0.05, "study",
        "The tokens that the question's last token looks at and that miss most, recomputed in the first layers.",
    ),
)  # fmt: skip


def cards() -> dict[str, str]:
    """All cards: file name → text."""
    made = {f"{recipe.name}.md": recipe_card(recipe, _rows(recipe.result)) for recipe in RECIPES}
    written = {f"{name}.md": model_card(name, (FOLDER / f"{name}.md").read_text("utf-8")) for name in MODELS}
    return {**written, **made}


def recipe_card(recipe: Recipe, rows: list[dict[str, Any]]) -> str:
    """The card of a recipe."""
    own = [row for row in rows if row["method"] == recipe.selector]
    shown = next(row for row in own if row["ratio"] == recipe.shown_ratio)
    ends = [row for row in rows if row["method"] in ("full prefill", "full reuse")]
    data = _data(recipe.name, {f"exact match at {recipe.shown_ratio:g}": shown["score"]}, shown["n"])
    name, _, options = recipe.selector.partition(":")
    pairs = dict(pair.split("=") for pair in options.split(",") if pair)
    return "\n".join([
        f"---\n{data.to_yaml()}\n---\n",
        f"# Recipe `{recipe.selector}` on the reference model\n",
        f"{recipe.about} Written by `python docs/build/cards.py` from "
        f"[{recipe.result}.json](../benchmarks/results/{recipe.result}.json).\n",
        f"n = {shown['n']} questions; exact match with 95 % intervals. *Nominal* is the share of the reusable tokens "
        "that is recomputed, *charged* what it cost, as a share of a full prefill's work on them.\n",
        "| method | nominal | charged | exact match |\n|---|---|---|---|",
        *(_line(row) for row in [*ends, *own]),
        "\n## How to use it\n",
        "```python\nfrom hf_blend import BlendCache, ChunkStore\n\nstore = ChunkStore.open(\"kv-store\")",
        f"cache = BlendCache(model, store, selector={name!r}, selector_options={pairs!r}, "
        f"recompute_ratio={recipe.shown_ratio:g})\n```\n",
        "All other settings of `BlendConfig` are the defaults.\n",
        f"{LIMITS}\n",
    ])  # fmt: skip


def model_card(name: str, text: str) -> str:
    """A card whose text is written by hand, with a new head."""
    title, result, world = MODELS[name]
    rows = {row["method"]: row for row in _rows(result)}
    scores = {f"exact match, {name}": rows[name]["score"] for name in ("full prefill", "full reuse")}
    data = _data(title, scores, rows["full prefill"]["n"], tags=["toy-model"], world=world)
    body = GATES_PLACE.sub(
        lambda place: f"{place[1]}\n{gates_table(result)}\n{place[2]}", ModelCard(text).text.strip()
    )
    return f"---\n{data.to_yaml()}\n---\n\n{body}\n"


def gates_table(result: str) -> str:
    """Every gate of a result file, and what the emulation scored."""
    made = json.loads((RESULTS / f"{result}.json").read_text("utf-8"))
    gates = ["| gate | expected | measured | |\n|---|---|---|---|"]
    gates += [
        f"| {one['gate']} | {one['expected']} | {one['figure']:.3f} | {'holds' if one['holds'] else '**fails**'} |"
        for one in made["gates"]
    ]
    depths = list(made["emulation"][0]["by_depth"])
    head = f"| exact match, emulation | all | {' | '.join(f'depth {depth}' for depth in depths)} |"
    lines = [
        f"| {row['method']} | {row['exact_match']:.3f} [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}] | "
        + " | ".join(f"{row['by_depth'][depth]:.2f}" for depth in depths)
        + " |"
        for row in made["emulation"]
    ]
    return "\n".join([*gates, "", head, "|---" * (2 + len(depths)) + "|", *lines])


def _data(
    name: str, scores: Mapping[str, float], count: int, tags: list[str] | None = None, world: dict[str, Any] = WORLD
) -> ModelCardData:
    results = [
        EvalResult(
            task_type="text-generation", metric_type="exact_match", metric_name=metric, metric_value=value,
            metric_args={"questions": count}, **world,
        )
        for metric, value in scores.items()
    ]  # fmt: skip
    return ModelCardData(
        model_name=name, license="apache-2.0", library_name="transformers", pipeline_tag="text-generation",
        language="en", tags=[*REPOSITORY_TAGS, *(tags or [])], metrics=["exact_match"], eval_results=results,
    )  # fmt: skip


def _rows(result: str) -> list[dict[str, Any]]:
    """Rows of a result file in one form: method, ratio, charged, score, low, high, n."""
    made = json.loads((RESULTS / f"{result}.json").read_text("utf-8"))
    rows = made.get("rows") or [{**row, "nominal_ratio": None, "charged_budget": None} for row in made["emulation"]]
    if result == "study":
        rows = [row for row in rows if row["task"] == "reference-world" and row["part"] == "final"]
        renamed = [{**row, "charged": row["charged_budget"]} for row in rows]
        named = [{**row, "method": row["method"].replace("full-", "full ")} for row in renamed]
        return sorted(named, key=lambda row: (row["ratio"] is not None, row["ratio"] or 0.0))
    return [
        {
            "method": row["method"], "ratio": row["nominal_ratio"], "charged": row["charged_budget"],
            "score": row["exact_match"], "low": row["interval"][0], "high": row["interval"][1], "n": row["n"],
        }
        for row in rows
    ]  # fmt: skip


def _line(row: Mapping[str, Any]) -> str:
    shares = ["" if row[name] is None else f"{100 * row[name]:.1f} %" for name in ("ratio", "charged")]
    score = f"{row['score']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    return f"| {row['method']} | {' | '.join(shares)} | {score} |"


def main() -> None:
    """Write the cards."""
    for name, text in cards().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
