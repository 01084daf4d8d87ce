# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Count the Python calls that hf_blend makes in one blended prefill of a model of four layers.

python benchmarks/calls.py                           # how many functions, files and calls
python benchmarks/calls.py --trace                   # each function with its calls, in the order of their first call
python benchmarks/calls.py --selector kv-deviation   # one that computes a layer in full to choose; --layers 30
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_blend
from hf_blend import BlendCache, BlendConfig, ChunkStore

PACKAGE = Path(hf_blend.__file__).parent
CHUNKS, CHUNK_TOKENS, QUESTION_TOKENS = 4, 32, 8


class Calls:
    """What runs between `start` and `stop`: (file, function) → calls, in the order of their first call."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> "Calls":
        """Count from here on."""
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        """Count no more."""
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            name = frame.f_code.co_qualname
            if not name.endswith((">", "<genexpr>")):  # comprehensions are not calls that a reader follows
                file = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
                self.counts[file, name] += 1


def tiny_model(layers: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def count_calls(layers: int = 4, selector: str = BlendConfig.selector) -> Calls:
    """Count one prefill whose chunks are in memory, on a model that was used before.

    Returns:
        The calls, from the model's first hook to its last.
    """
    model, store = tiny_model(layers), ChunkStore.open("memory://")
    ids = torch.randint(3, 128, (CHUNKS, CHUNK_TOKENS)).tolist()
    question = torch.randint(3, 128, (QUESTION_TOKENS,)).tolist()
    for _ in range(2):
        cache = BlendCache(model, store, selector=selector)
        inputs = cache.inputs(None, prefix=[1], chunks=ids, question=question)
        with torch.no_grad(), Calls() as calls:
            model(**inputs, past_key_values=cache, logits_to_keep=1)
    return calls


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="name every function")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--selector", default=BlendConfig.selector)
    given = parser.parse_args()
    calls = count_calls(given.layers, given.selector)
    if given.trace:
        for (file, name), count in calls.counts.items():
            print(f"{count:5} {file}: {name}")
    files = {file for file, _ in calls.counts}
    found = {"layers": given.layers, "selector": given.selector}
    print(json.dumps(found | {"functions": len(calls.counts), "calls": calls.counts.total(), "files": len(files)}))


if __name__ == "__main__":
    main()
