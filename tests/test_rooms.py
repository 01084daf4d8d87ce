# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The core does without any room: each is left out of a copy, in which the core is imported and its tests pass."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("context", "hybrids", "integrations", "loading", "offload", "serving", "sparse", "verify")
PUBLIC_OF_ROOMS = {"ShiftCache", "SequenceCache", "self_extend", "sparse_decoding"}
APART = {*ROOMS, "cli", "evaluation", "bundled", "__main__.py"}
OTHER_TESTS = {"test_benchmarks.py", "test_imports.py", "test_plugins.py", "test_real_model.py"}  # of the repository
RUN = """
import importlib, pytest, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]  # would find what is absent
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2].split():
    importlib.import_module(name)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[3].split()]))
"""


def copy_without(folder, rooms):
    """Make a checkout in which some rooms are not there; tests and whatever else they need are links."""
    (folder / "hf_blend").mkdir(parents=True)
    for name in ("benchmarks", "docs", "setup.cfg", "tests"):
        (folder / name).symlink_to(ROOT / name)
    for path in (ROOT / "hf_blend").iterdir():
        if path.suffix == ".py":
            shutil.copy2(path, folder / "hf_blend")
        elif path.name == "bundled":
            (folder / "hf_blend" / path.name).symlink_to(path)
        elif path.is_dir() and path.name not in rooms:
            shutil.copytree(path, folder / "hf_blend" / path.name)
    return folder


def core_modules():
    found = set()
    for path in (ROOT / "hf_blend").rglob("*.py"):
        inside = path.relative_to(ROOT)
        if APART.isdisjoint(inside.parts):
            found.add(".".join(inside.with_suffix("").parts).removesuffix(".__init__"))
    return sorted(found)


def imports_of(path):
    """Every dotted name that a file of tests imports, by itself or by a helper."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            helper = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            if helper.is_relative_to(ROOT / "tests") and helper.exists() and helper.stem != "conftest":
                found |= imports_of(helper)
    return found


def core_tests():
    """The test files that import of hf_blend nothing but the core."""
    found = []
    for path in [*(ROOT / "tests").glob("test_*.py"), *(ROOT / "tests" / "store").glob("test_*.py")]:
        parts = {name.split(".")[1] for name in imports_of(path) if name.startswith("hf_blend.")}
        if parts and parts.isdisjoint(APART | PUBLIC_OF_ROOMS) and path.name not in OTHER_TESTS:
            found.append(str(path.relative_to(ROOT)))
    return sorted(found)


def run_in(folder, modules, tests):
    """Import modules and run tests in a copy, where what is installed of the package is not found."""
    return subprocess.run(
        [sys.executable, "-P", "-c", RUN, str(folder), " ".join(modules), " ".join(tests)],
        cwd=folder,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("absent", [*[(room,) for room in ROOMS], ROOMS], ids="+".join)
def test_core_tests_pass_without_room(absent, tmp_path):
    done = run_in(copy_without(tmp_path / "copy", absent), core_modules(), core_tests())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_setting_of_absent_room_is_refused_by_name(monkeypatch):
    from hf_blend import ConfigError, plugins

    monkeypatch.setitem(sys.modules, "hf_blend.offload", None)
    monkeypatch.delitem(sys.modules, "hf_blend.offload.layer", raising=False)
    with pytest.raises(ConfigError, match=r"this needs hf_blend\.offload\.layer, which is not installed here\."):
        plugins.extension("offload.layer")
