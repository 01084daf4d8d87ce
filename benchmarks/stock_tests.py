# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of transformers itself, of generation and caches in seven families, with our caches in the place of its own.

    python benchmarks/stock_tests.py SOURCES --cache BlendCache

SOURCES is a folder with `tests` and `utils` of a source of transformers, near the version that is installed; `pip
install parameterized`. The tests are those of `GenerationTesterMixin` and those with "cache" in their name, without
compiled, static, quantised, flash and exported ones. Each `generate` that would make a cache receives one of ours,
over an empty store. What a cache refuses by name is generated with stock's. Counts go to results/stock_tests.json.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from transformers import GenerationMixin

from hf_blend import BlendCache, ChunkStore, HfBlendError, SequenceCache, ShiftCache
from hf_blend.model.anatomy import cache_argument

FAMILIES = ("llama", "qwen2", "gemma2", "gemma3", "mistral", "gpt_oss", "qwen3_next")
LEFT_OUT = ("compil", "static", "quant", "flash", "_fa", "export", "training", "multi_", "disk", "parallel")
RESULTS = Path(__file__).parent / "results/stock_tests.json"
UNUSED = {  # mixins whose modules need other versions, or several processes
    "test_fsdp_mixin": "FSDPTesterMixin",
    "test_tensor_parallel_mixin": "TensorParallelTesterMixin",
    "test_training_mixin": "TrainingTesterMixin",
}
CACHES: dict[str, Callable[[Any], Any]] = {
    "BlendCache": lambda model: BlendCache(model, ChunkStore.open("memory://")),
    "SequenceCache": SequenceCache,
    "ShiftCache": ShiftCache,
}


def replace_caches(make: Callable[[Any], Any], calls: Counter[str]) -> None:
    """Let `generate` receive a cache wherever it would make one, but not an assistant's; counts the calls."""
    generate = GenerationMixin.generate
    running: list[Any] = []

    @wraps(generate)
    def generated(model: Any, *given: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or model.generation_config
        uses_cache = kwargs.get("use_cache", getattr(config, "use_cache", True)) is not False
        is_named = kwargs.get("cache_implementation") or getattr(config, "cache_implementation", None)
        if running or is_named or not uses_cache or kwargs.get("past_key_values") is not None:
            return generate(model, *given, **kwargs)
        running.append(model)
        try:
            output = generate(model, *given, **kwargs, **cache_argument(model, make(model)))
            calls["with our cache"] += 1
        except HfBlendError as error:
            calls[f"refused: {error!s:.80}"] += 1
            output = generate(model, *given, **kwargs)
        finally:
            running.clear()
        return output

    GenerationMixin.generate = generated


class Suite:
    """A plugin of pytest: which tests are run, and what became of them."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the tests of generation and of caches."""
        from tests.generation.test_utils import GenerationTesterMixin

        kept = []
        for item in items:
            name = item.originalname
            is_asked = hasattr(GenerationTesterMixin, name) or "cache" in name
            if is_asked and not any(word in name for word in LEFT_OUT):
                kept.append(item)
        items[:] = kept

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a result."""
        if report.when == "call" or report.skipped or report.failed:
            self.results[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2] + " " + Path(report.fspath).parent.name)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--cache", choices=["stock", *CACHES], default="BlendCache")
    given = parser.parse_args()
    sources = given.sources.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[:0] = [str(sources), str(sources / "utils")]
    for module, mixin in UNUSED.items():
        empty = sys.modules[f"tests.{module}"] = ModuleType(f"tests.{module}")
        setattr(empty, mixin, type(mixin, (), {}))
    calls: Counter[str] = Counter()
    if given.cache != "stock":
        replace_caches(CACHES[given.cache], calls)
    files = [str(sources / f"tests/models/{name}/test_modeling_{name}.py") for name in FAMILIES]
    suite = Suite()
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(sources), "--tb=line"]
    pytest.main([*options, *files], plugins=[suite])
    rows = json.loads(RESULTS.read_text("utf-8"))["rows"] if RESULTS.exists() else []
    kept = [row for row in rows if row["cache"] != given.cache]
    kept.append({"cache": given.cache, **suite.results, "calls": calls, "failed": suite.failed})
    RESULTS.write_text(json.dumps({"transformers": transformers.__version__, "rows": kept}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
