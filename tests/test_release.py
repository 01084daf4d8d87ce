# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is released works where nothing of the checkout is: wheel and sdist, in an environment of their own."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from hf_blend.version import __version__

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "hf_blend", "cli", "evaluation")
REDUCED = {  # what would take many minutes or never end, in little
    "hf-blend bench ttft": "--shape tiny --chunks 3 --chunk-tokens 64 --question-tokens 8 --rounds 1",
    "hf-blend demo": "--check",
}
BUILD = (sys.executable, "-P", "-m", "build", "-q", "--no-isolation")
README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = sorted(
    {
        line.removeprefix("$ ").partition("  #")[0].strip()
        for line in README.splitlines()
        if re.match(r"(\$ )?hf-blend ", line) and "HuggingFaceTB" not in line  # no hub here
    }
)


def run(command, folder, **settings):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, **settings)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist of this checkout, built by `python -m build` from a copy."""
    pytest.importorskip("build", reason="build is not installed: pip install build")
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    run([*BUILD, "--outdir", source / "dist", source], source)
    return {path.suffix: path for path in (source / "dist").iterdir()}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder of the programs of a new environment; what hf_blend needs is borrowed from this one."""
    home = tmp_path_factory.mktemp("clean")
    run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], home)
    bin_folder = home / "venv" / "bin"
    (own,) = (home / "venv" / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", bin_folder / "python"]
    run([*pip, "install", "-q", "--no-deps", built[".whl"]], home)
    (own / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return bin_folder


def test_the_sdist_makes_the_same_wheel(built, tmp_path):
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run([*BUILD, "-w", "--outdir", tmp_path / "again", source], tmp_path)
    (again,) = (tmp_path / "again").glob("*.whl")
    held = [sorted(zipfile.ZipFile(one).namelist()) for one in (built[".whl"], again)]
    assert held[0] == held[1]
    assert "hf_blend/py.typed" in held[0]
    assert {"hf_blend/evaluation/demo/page.css", "hf_blend/evaluation/demo/quality.json"} <= set(held[0])


def test_what_is_imported_is_what_was_installed(installed, tmp_path):
    code = "import hf_blend, hf_blend.cli.main, hf_blend.evaluation; print(hf_blend.__file__, hf_blend.__version__)"
    file, version = run([installed / "python", "-c", code], tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert version == __version__


def test_types_are_found_by_a_checker(installed, tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")
    (tmp_path / "user.py").write_text("from hf_blend.errors import suggest\nreveal_type(suggest('a', ['b']))\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", installed / "python", "--follow-imports=silent"]
    assert 'Revealed type is "str"' in run([*command, "user.py"], tmp_path).replace("builtins.", "")


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_of_the_readme_runs(line, installed, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_text("Rolf works as the miller indeed.\n")
    words = shlex.split(f"{line} {REDUCED.get(line, '')}")
    environment = {**os.environ, "HF_BLEND_HOME": str(tmp_path / "home"), "PATH": f"{installed}:{os.environ['PATH']}"}
    run([installed / words[0], *words[1:]], tmp_path, env=environment)
