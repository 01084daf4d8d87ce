# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Fit the probe of the selector `learned` to one model, from prompts that it will not be measured on.

python benchmarks/fitting.py --task musique --output probe.safetensors

Every prompt is computed in full, and every chunk of it alone. The target is how far a token's values move, relative to
their size, summed over all layers, in logarithm; the features are the values of the chunk computed alone, in the first
layers. One ridge regression gives the weights.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_blend import plugins
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.tasks.base import Sample
from hf_blend.model.anatomy import default_sink
from hf_blend.model.capture import capture

LAYERS = (0, 1, 2, 3)
_FLOOR = 1e-4  # of a relative squared deviation: below it nothing moved
PREFIX = "values."  # of the names of tensors that the selector reads
_RIDGE = 1e-3  # of the mean square of the features


def fit(
    model: nn.Module, samples: Iterable[Sample], sink: Sequence[int], layers: Sequence[int] = LAYERS
) -> dict[str, Tensor]:
    """Fit a probe.

    Shape: `[kv_heads, head_dim]`.
    """
    rows = [_features(model, sample, sink, layers) for sample in samples]
    features, target = (torch.cat(part).double() for part in zip(*rows, strict=True))
    features, target = features - features.mean(0), target - target.mean()
    gram = features.T @ features
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights = torch.linalg.solve(gram + ridge, features.T @ target).float()
    heads, width = _shape(model, sink)
    parts = weights.reshape(len(layers), heads, width)
    return {f"{PREFIX}{layer}": part.contiguous() for layer, part in zip(layers, parts, strict=True)}


def _shape(model: nn.Module, sink: Sequence[int]) -> tuple[int, int]:
    """Heads and width of the values."""
    values = capture(model, torch.tensor([[*(sink or (0,))]])).layers[0][1]
    return values.shape[1], values.shape[3]


def _features(model: nn.Module, sample: Sample, sink: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Values of the chunks computed alone, `[tokens, features]`, and how far each token's move, `[tokens]`."""
    ids = [*sink, *sample.prefix, *(token for chunk in sample.chunks for token in chunk)]
    truth = [values for _, values in capture(model, torch.tensor([ids])).layers]
    start, features, targets = len(sink) + len(sample.prefix), [], []
    for chunk in sample.chunks:
        alone = [values[:, :, len(sink) :] for _, values in capture(model, torch.tensor([[*sink, *chunk]])).layers]
        there = [values[:, :, start : start + len(chunk)] for values in truth]
        moved = sum(_relative(new, old) for new, old in zip(there, alone, strict=True))
        features.append(torch.cat([alone[layer][0].transpose(0, 1).flatten(1) for layer in layers], 1).float())
        targets.append((torch.as_tensor(moved) + _FLOOR).log())
        start += len(chunk)
    return torch.cat(features), torch.cat(targets)


def _relative(new: Tensor, old: Tensor) -> Tensor:
    """Squared distance by token over the mean square of the new, `[tokens]`."""
    distance = (new.float() - old.float()).square().sum((0, 1, 3))
    return distance / new.float().square().sum((0, 1, 3)).mean()


def main(words: Sequence[str] | None = None) -> None:
    """Fit a probe and write its file."""
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, hub id, or the name of a bundled model")
    parser.add_argument("--task", default="needle", help="whose prompts")
    parser.add_argument("--data", type=Path, help="JSONL file of the task")
    parser.add_argument("--count", type=int, default=100, help="prompts")
    parser.add_argument("--seed", type=int, default=77, help="which; measure on others")
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args(words)
    model, tokenizer = load_model(chosen.model)
    task = plugins.load("evaluation.tasks", chosen.task)(tokenizer, chosen.data, chosen.seed)
    save_file(fit(model, task.samples(chosen.count), default_sink(model)), chosen.output)


if __name__ == "__main__":
    main()
