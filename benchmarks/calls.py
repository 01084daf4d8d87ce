# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What of hf_blend runs for one request with two stored chunks: files, classes, functions and calls.

python benchmarks/calls.py                           # how many of each
python benchmarks/calls.py --trace                   # each function with its calls, in the order of their first call
python benchmarks/calls.py --selector kv-deviation   # another rule; --layers 30 a deeper model
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
CHUNKS = 2
CHUNK_TOKENS = 64
QUESTION_TOKENS = 8
COUNTED = (
    "A request with two chunks that are stored in memory, on a model that was used before. `prompt`: "
    "BlendCache(model, store) and cache.inputs; `prefill`: from the model's first hook to its last. Files: those of "
    "which a function ran. Classes: those of which a method ran or an object was made. Comprehensions and lambdas "
    "are no functions here."
)


class Calls:
    """What ran inside a `with`: (file, function) → calls, in the order of their first call."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.classes: set[str] = set()

    @property
    def files(self) -> set[str]:
        """The files whose functions ran."""
        return {file for file, _ in self.counts}

    def __enter__(self) -> "Calls":
        """Count from here on."""
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        """Count no more."""
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename == "<string>":  # what dataclasses and named tuples write for themselves
            self._count_made(frame)
        elif code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<"):
            file = Path(code.co_filename).relative_to(PACKAGE)
            self.counts[str(file), code.co_qualname] += 1
            self._count_class(str(file), code.co_qualname)

    def _count_class(self, file: str, name: str) -> None:
        """Count the class of a method: the part of its name that begins with a capital letter."""
        for part in name.split(".")[:-1]:
            if part.lstrip("_")[:1].isupper():
                self.classes.add(f"{file}: {part}")

    def _count_made(self, frame: FrameType) -> None:
        """Count the class of an object whose constructor is written by the standard library."""
        if frame.f_code.co_name not in ("__init__", "__new__"):
            return
        first = next(iter(frame.f_locals.values()), None)
        made = first if isinstance(first, type) else type(first)
        if made.__module__.startswith("hf_blend."):
            file = made.__module__.removeprefix("hf_blend.").replace(".", "/") + ".py"
            self.classes.add(f"{file}: {made.__name__}")


def tiny_model(layers: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def count_calls(layers: int = 4, selector: str = BlendConfig.selector) -> dict[str, Calls]:
    """Count the two parts of a request whose chunks are in memory, on a model that was used before."""
    model = tiny_model(layers)
    store = ChunkStore.open("memory://")
    chunks = torch.randint(3, 128, (CHUNKS, CHUNK_TOKENS)).tolist()
    question = torch.randint(3, 128, (QUESTION_TOKENS,)).tolist()
    for _ in range(2):  # the first one calibrates the model and stores the chunks
        with Calls() as prompt:
            cache = BlendCache(model, store, selector=selector)
            inputs = cache.inputs(None, prefix=[1], chunks=chunks, question=question)
        with torch.no_grad(), Calls() as prefill:
            model(**inputs, past_key_values=cache, logits_to_keep=1)
    return {"prompt": prompt, "prefill": prefill}


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="name every class and function")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--selector", default=BlendConfig.selector)
    given = parser.parse_args()
    parts = count_calls(given.layers, given.selector)
    found: dict[str, Any] = {"counted": COUNTED, "layers": given.layers, "selector": given.selector}
    for part, calls in parts.items():
        if given.trace:
            print_trace(part, calls)
        found[part] = {
            "files": len(calls.files),
            "classes": len(calls.classes),
            "functions": len(calls.counts),
            "calls": calls.counts.total(),
        }
    prompt, prefill = parts.values()
    found["both"] = {"files": len(prompt.files | prefill.files), "classes": len(prompt.classes | prefill.classes)}
    print(json.dumps(found, indent=1))


def print_trace(part: str, calls: Calls) -> None:
    """Print every class and function of a part."""
    print(f"# {part}")
    for name in sorted(calls.classes):
        print(f"class {name}")
    for (file, name), count in calls.counts.items():
        print(f"{count:5} {file}: {name}")


if __name__ == "__main__":
    main()
