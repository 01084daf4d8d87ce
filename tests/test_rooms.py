# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The core does without any room: each is left out of a copy, in which the core is imported and its tests pass.

The tiers on other machines are a room, too, though their files stand beside those of the disk, as methods do.
"""

import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAR = "far tiers"
FAR_FILES = ("store/tiers/fsspec.py", "store/tiers/redis.py", "store/tiers/remote.py")
ROOMS = (*"context hybrids integrations loading offload serving sparse verify".split(), FAR)
OF_FAR = {"behind", "remote", "tiers"}  # tests of the store that need them
APART = {*ROOMS, "__main__.py"}  # not of the core
OF_ROOMS = {*ROOMS, "cli", "evaluation"}  # and the words of `hf_blend` that come from rooms
OF_ROOMS |= {"ShiftCache", "self_extend", "SequenceCache", "sparse_decoding"}
OF_THE_REPOSITORY = {"benchmarks", "eval_scores", "faults", "imports", "plugins", "real_model"}
ALONE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]  # would find what is absent
sys.path.insert(0, sys.argv[1])
"""
RUN = """
import importlib, pytest
modules, tests = sys.argv[2].split(), sys.argv[3].split()
for name in modules:
    importlib.import_module(name)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *tests]))
"""


def copy_without(folder: Path, rooms: tuple[str, ...]) -> Path:
    """Make a checkout in which some rooms are not there; tests and whatever else they need are links."""
    copy = folder / "+".join(rooms)
    (copy / "hf_blend").mkdir(parents=True)
    for name in ("benchmarks", "docs", "setup.cfg", "tests"):
        (copy / name).symlink_to(ROOT / name)
    for path in (ROOT / "hf_blend").iterdir():
        if path.suffix == ".py":
            shutil.copy2(path, copy / "hf_blend")
        elif path.name == "bundled":
            (copy / "hf_blend" / path.name).symlink_to(path)
        elif path.is_dir() and path.name not in rooms:
            shutil.copytree(path, copy / "hf_blend" / path.name)
    for name in FAR_FILES if FAR in rooms else ():
        (copy / "hf_blend" / name).unlink()
    return copy


def core_modules() -> list[str]:
    """Every module of the core."""
    files = [path.relative_to(ROOT) for path in (ROOT / "hf_blend").rglob("*.py")]
    apart = {*APART, "bundled", *FAR_FILES}
    core = [path for path in files if apart.isdisjoint((*path.parts, str(path.relative_to("hf_blend"))))]
    return sorted({".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in core})


@functools.cache
def parts_imported(path: Path) -> frozenset[str]:
    """The parts of the package, and words of it, that a file of tests imports, by itself or by a helper."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names |= {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    parts = {name.split(".")[1] for name in names if name.startswith("hf_blend.")}
    others = {node.module or "" for node in froms}
    helpers = {ROOT / f"{name.replace('.', '/')}.py" for name in others if name.startswith("tests.")}
    parts |= {part for one in helpers if one.stem != "conftest" and one.exists() for part in parts_imported(one)}
    return frozenset(parts | ({"verify"} if "families" in others else set()))


def core_tests(absent: tuple[str, ...] = ()) -> list[str]:
    """The test files that import nothing but the core, and need no tier of other machines where these are absent."""
    found = []
    for path in [*(ROOT / "tests").glob("test_*.py"), *(ROOT / "tests" / "store").glob("test_*.py")]:
        parts = parts_imported(path)
        if parts and not parts & OF_ROOMS and path.stem.removeprefix("test_") not in OF_THE_REPOSITORY:
            found.append(str(path.relative_to(ROOT)))
    far = OF_FAR if FAR in absent else ()
    return sorted(path for path in found if Path(path).stem.removeprefix("test_") not in far)


def run_in(copy: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy, where what is installed of the package is not found."""
    return subprocess.run(
        [sys.executable, "-P", "-c", ALONE + code, str(copy), *arguments],
        cwd=copy, text=True, capture_output=True, check=False, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("room", [*ROOMS, "all of them"])
def test_the_tests_of_the_core_pass_without_a_room(room, tmp_path):
    absent = (room,) if room in ROOMS else ROOMS
    done = run_in(copy_without(tmp_path, absent), RUN, " ".join(core_modules()), " ".join(core_tests(absent)))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_setting_of_an_absent_room_is_refused_with_its_name(tmp_path):
    done = run_in(
        copy_without(tmp_path, ("offload",)), "from hf_blend import plugins; plugins.extension('offload.layer')"
    )
    assert "ConfigError: this needs hf_blend.offload, which is not installed here." in done.stderr
