# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Lines of Python by room, beside how many each should have at most: `python benchmarks/lines.py`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = {  # room → lines that it should have at most
    "top": 700, "prompt": 700, "rotary": 350, "selectors": 700, "correctors": 200, "model": 2900, "prefill": 1900,
    "cache": 1300, "store": 4200,
}  # fmt: skip
ROOMS = {
    "context": 2000, "hybrids": 900, "images": 700, "sparse": 1500, "offload": 800, "loading": 300, "serving": 1900,
    "integrations": 600, "training": 300, "verify": 1000,
}  # fmt: skip
FAR = ("store/tiers/fsspec.py", "store/tiers/redis.py", "store/tiers/remote.py")  # a room beside other tiers
BESIDE = {"cli": 2000, "evaluation": 4000}
TARGETS = {"hf_blend": 24_000, "wheel": 30_000, "tests": 22_000}


def count(folder: Path, pattern: str = "**/*.py") -> int:
    """Return the lines of the Python files below a folder."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.glob(pattern))


def by_room() -> dict[str, int]:
    """Return the lines of each room of the package, and of what is installed beside it."""
    package = ROOT / "hf_blend"
    folders = sorted(path for path in package.iterdir() if path.is_dir() and any(path.glob("**/*.py")))
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


if __name__ == "__main__":
    print(table())
