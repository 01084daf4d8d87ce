# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of an inspection; needs matplotlib, the extra `plot`."""

from pathlib import Path
from typing import Any

from hf_blend.errors import ConfigError

from .inspecting import Inspection


def draw(found: Inspection, path: Path) -> None:
    """Draw five panels into a PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"{str(path)!r} needs matplotlib: {error}. Run pip install hf-blend[plot].") from error
    figure = Figure(figsize=(14, 11), layout="constrained")
    grid = figure.add_gridspec(3, 3)
    _deviation(figure.add_subplot(grid[0, :]), figure, found)
    _choices(figure.add_subplot(grid[1, :]), found)
    _line(figure.add_subplot(grid[2, 0]), "rank correlation with the layer before", found.rank_correlation)
    _line(figure.add_subplot(grid[2, 1]), "share of keys that holds 90 % of attention", found.sparsity)
    _ratios(figure.add_subplot(grid[2, 2]), found)
    figure.savefig(path, dpi=110)


def _deviation(axes: Any, figure: Any, found: Inspection) -> None:
    image = axes.imshow(found.deviation, aspect="auto", cmap="magma", interpolation="nearest")
    axes.set(title="deviation of stored K and V from full prefill", ylabel="layer", xlabel="reusable token")
    figure.colorbar(image, ax=axes)
    if len(found.tokens) <= 160:
        axes.set_xticks(range(len(found.tokens)), [text.strip() or "⏎" for text in found.tokens], rotation=90, size=6)


def _choices(axes: Any, found: Inspection) -> None:
    grid = [list(map(float, row)) for row in found.chosen.values()]
    axes.imshow(grid, aspect="auto", cmap="Greys", vmin=0, vmax=1.3)
    axes.set_yticks(range(len(found.chosen)), list(found.chosen), size=8)
    axes.set(title=f"tokens that are taken at a ratio of {found.ratio:g}", xlabel="reusable token")


def _line(axes: Any, title: str, values: list[Any]) -> None:
    axes.plot(range(len(values)), [float("nan") if value is None else value for value in values], marker="o")
    axes.set(title=title, xlabel="layer", ylim=(min(0, axes.get_ylim()[0]), 1.02))


def _ratios(axes: Any, found: Inspection) -> None:
    ratios = [float(ratio) for ratio in found.attention_deviation]
    axes.plot(ratios, list(found.attention_deviation.values()), marker="o")
    axes.set(title=f"attention deviation, {found.selector}", xlabel="recompute ratio", ylim=(0, None))
