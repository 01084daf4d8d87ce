# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Lines of Python by room, beside how many each should have at most.

python benchmarks/lines.py               # rooms, core, library, wheel, tests
python benchmarks/lines.py --promises    # of the rooms with more, which promise takes how many lines
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = {  # room → lines that it should have at most
    "top": 700, "prompt": 700, "rotary": 350, "selectors": 700, "correctors": 200, "model": 2900, "prefill": 1900,
    "cache": 1300, "store": 4200,
}  # fmt: skip
ROOMS = {
    "context": 2000, "hybrids": 900, "sparse": 1500, "offload": 800, "loading": 300, "serving": 1900,
    "integrations": 600, "verify": 1000,
}  # fmt: skip
FAR = ("store/tiers/fsspec.py", "store/tiers/redis.py", "store/tiers/remote.py")  # a room beside other tiers
BESIDE = {"cli": 2000, "evaluation": 4000}
PROMISES = {  # what a user would lose with the files, by room; a room keeps its promises rather than its target
    "top": {
        "a setting is checked before a model is touched, with what to write instead": ("config.py",),
        "methods are files, of ours and of other distributions": ("plugins.py",),
        "models by name, folder or package; stores of their chunks": ("model_names.py", "chunk_store.py"),
    },
    "model": {
        "any type is judged by its structure and by probes of it, never by its name": (
            "model/anatomy.py", "model/calibrate.py", "model/checks.py", "model/flops.py",
        ),
        "weights, code, hooks, modes that change are noticed, and change the key": (
            "model/identity", "model/fingerprint.py", "model/author.py", "model/canary.py",
        ),
        "exact masks for scattered rows, at the price of the rows": ("model/row_masks.py",),
        "chunks behind text": ("model/context.py",),
        "quantised and offloaded models, images, caches of a model's own": (
            "model/quantised.py", "model/placement.py", "model/modality.py", "model/own_cache.py", "model/extras.py",
        ),
    },
    "prefill": {
        "nothing per chunk: all chunks move together, layers are read and copied ahead": (
            "prefill/realign.py", "prefill/buffers.py", "prefill/copies.py", "prefill/pipeline.py",
        ),
        "what a request cost, and why nothing was reused": ("prefill/report.py", "prefill/notices.py"),
        "selectors that look at attention": ("prefill/observing.py",),
        "importance for the store": ("prefill/importance.py",),
    },
    "cache": {
        "K and V in 8 and in 4 bits": ("cache/quantised_layer.py",),
        "attention by an indexer": ("cache/indexed_layer.py",),
        "further turns keep what the same model computed of them": ("cache/turns.py",),
        "a blended cache becomes exact while nobody waits": ("cache/healing.py", "cache/idle_healing.py"),
        "forwards are noticed however they come, and undone": ("cache/forward_watch.py", "cache/blending.py"),
    },
    "store": {
        "processes share a folder: one index, caps, quotas, eviction, listings": (
            "store/index.py", "store/budget.py", "store/catalog.py",
        ),
        "every byte is verified: seals, secrets, headers that lie, tensors that were written to": (
            "store/entry.py", "store/format.py", "store/seal.py", "store/guard.py",
        ),
        "slow tiers keep nobody waiting": ("store/write_queue.py", "store/stream.py"),
        "chunks are found by content at any offset": ("store/content.py",),
        "importance over requests and restarts": ("store/importance.py",),
        "Prometheus": ("store/metrics.py",),
    },
    "context": {
        "Self-Extend": ("context/self_extend.py",),
        "sessions as files": ("context/session.py",),
    },
    "sparse": {
        "IMPRESS: chunks loaded in part": ("sparse/partial",),
        "sparse decoding over K and V that are away": ("sparse/away.py",),
    },
    "prompt": {
        "one rule of what a document is, and text found as people read it": ("prompt/documents.py", "prompt/text.py"),
        "the tokens that a chat template writes": ("prompt/messages.py",),
    },
    "offload": {"K and V in memory and in files, each piece verified": ("offload/states.py",)},
    "loading": {"prices and delays of this machine": ("loading/profile.py", "loading/estimator.py")},
    "integrations": {
        "vLLM": ("integrations/vllm",),
        "datasets and Ray": ("integrations/datasets.py", "integrations/ray.py", "integrations/indexing.py"),
        "LangChain": ("integrations/langchain.py", "integrations/answering.py"),
    },
    "verify": {"a floor for each model, dtype and attention": ("verify/model_under_test.py", "verify/runner.py")},
}  # fmt: skip
TARGETS = {"hf_blend": 24_000, "wheel": 30_000, "tests": 22_000}


def count(folder: Path, pattern: str = "**/*.py") -> int:
    """Return the lines of the Python files below a folder."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.glob(pattern))


def by_room() -> dict[str, int]:
    """Return the lines of each room of the package, and of what is installed beside it."""
    package = ROOT / "hf_blend"
    rooms = [path for path in package.iterdir() if path.is_dir() and path.name not in BESIDE]
    folders = sorted(path for path in rooms if any(path.glob("**/*.py")))
    found = {"top": count(package, "*.py"), **{path.name: count(path) for path in folders}}
    found["far tiers"] = sum(count(package, name) for name in FAR)
    found["store"] -= found["far tiers"]
    return {**found, **{name: count(ROOT / name) for name in BESIDE}}


def totals() -> dict[str, int]:
    """Return the lines of the library, of all that is installed, and of the tests."""
    library = count(ROOT / "hf_blend")
    return {
        "hf_blend": library,
        "wheel": library + sum(count(ROOT / name) for name in BESIDE),
        "tests": count(ROOT / "tests"),
    }


def table() -> str:
    """Write all of it as a table."""
    found, known = by_room(), {**CORE, **ROOMS, **BESIDE}
    rows = [(name, found.get(name, 0), known.get(name, 0)) for name in dict.fromkeys((*known, *found))]
    core = [(found.get(name, 0), target) for name, target in CORE.items()]
    rows.append(("core", sum(lines for lines, _ in core), sum(target for _, target in core)))
    rows += [(name, lines, TARGETS[name]) for name, lines in totals().items()]
    rows += [("benchmarks", count(ROOT / "benchmarks"), 0), ("docs/build", count(ROOT / "docs" / "build"), 0)]
    lines = [f"{name:14}{lines:>8,}{f'{target:,}' if target else '-':>8}" for name, lines, target in rows]
    return "\n".join([f"{'room':14}{'lines':>8}{'target':>8}", *lines])


def promises() -> str:
    """Write which promise takes how many lines of the rooms that have more than they should."""
    found, lines = by_room(), [f"{'lines':>6}  promise"]
    for name, held in PROMISES.items():
        most = {**CORE, **ROOMS}[name]
        lines.append(f"\n{name}: {found[name]:,} lines, {found[name] - most:,} more than {most:,}")
        lines += [f"{promised_lines(paths):>6,}  {promise}" for promise, paths in held.items()]
    return "\n".join(lines)


def promised_lines(paths: tuple[str, ...]) -> int:
    """Return the lines of some files and folders of the package."""
    files = [ROOT / "hf_blend" / path for path in paths]
    return sum(count(path) if path.is_dir() else count(path.parent, path.name) for path in files)


if __name__ == "__main__":
    print(promises() if "--promises" in sys.argv else table())
