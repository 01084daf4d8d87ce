# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is installed is what is here and nothing else, also as wheel, as sdist, as the Space and as an image."""

import ast
import configparser
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
import yaml
from huggingface_hub import SpaceCard
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_blend.version import __version__
from tests.servers import start_space

ROOT = Path(__file__).resolve().parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", "utf-8")
OPTIONS = SETUP["options"]
FOLDERS = dict(entry.split(" = ") for entry in OPTIONS["package_dir"].split("\n") if entry)
EXTRAS = SETUP["options.extras_require"]
IMPORTED_AS = {  # import: distribution
    "haystack": "haystack-ai",
    "llama_index": "llama-index-core",
    "PIL": "pillow",
}


def requirements(*texts: str) -> list[Requirement]:
    """Parse requirements, one a line, leaving out comments and our own extras."""
    found = []
    for line in "\n".join(texts).split("\n"):
        if line.strip() and not line.strip().startswith(("#", "hf-blend[")):
            found.append(Requirement(line.strip()))
    return found


def names(parsed: list[Requirement]) -> set[str]:
    """The distributions that requirements are about."""
    return {canonicalize_name(requirement.name) for requirement in parsed}


PINS = requirements((ROOT / "constraints.txt").read_text("utf-8"))
OLDEST = requirements((ROOT / "constraints-oldest.txt").read_text("utf-8"))
ALLOWED = requirements(OPTIONS["install_requires"], *EXTRAS.values())
VERSIONS = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in PINS}
OLDEST_VERSIONS = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in OLDEST}


def test_packages_are_folders_with_modules_and_their_data_exists():
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.parent.relative_to(ROOT / folder)
            if "bundled" not in inside.parts:
                found.add(".".join([package, *inside.parts]))
    assert found == set(OPTIONS["packages"].split())
    for package, patterns in SETUP["options.package_data"].items():
        for pattern in patterns.split():
            assert any((ROOT / FOLDERS[package]).glob(pattern)), (package, pattern)


def test_imports_are_declared():
    imported = set()
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - {"hf_blend"}
    assert {canonicalize_name(IMPORTED_AS.get(name, name)) for name in others} <= names(ALLOWED)


def test_pins_are_allowed_and_oldest_transformers_is_oldest_allowed():
    for requirement in ALLOWED:
        version = VERSIONS.get(canonicalize_name(requirement.name))
        assert version is None or version in requirement.specifier, requirement
    for requirement in requirements(OPTIONS["install_requires"]):
        assert canonicalize_name(requirement.name) in VERSIONS
    (transformers,) = [requirement for requirement in ALLOWED if requirement.name == "transformers"]
    oldest = OLDEST_VERSIONS["transformers"]
    assert oldest in transformers.specifier
    assert f">={oldest.removesuffix('.0')}" in str(transformers.specifier)
    assert names(OLDEST) <= names(PINS), "only what differs from the tested versions"


def test_citation_names_version_that_is_here():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == __version__


def test_space_brings_what_library_needs_in_tested_versions():
    card = SpaceCard((ROOT / "app" / "README.md").read_text("utf-8")).data.to_dict()
    assert card["sdk"] == "gradio"
    assert card["sdk_version"] == VERSIONS["gradio"]
    assert (ROOT / "app" / card["app_file"]).is_file()
    brought = requirements((ROOT / "app" / "requirements.txt").read_text("utf-8"))
    assert set(map(str, brought)) <= set(map(str, PINS))
    assert names(brought) == names(requirements(OPTIONS["install_requires"], EXTRAS["demo"]))


@pytest.mark.slow
@pytest.mark.usefixtures("small_smollm2")
def test_space_answers_from_its_own_folder(tmp_path):
    from hf_blend.evaluation.demo.request import first_answers

    server = start_space(tmp_path / "space")
    try:
        answers = first_answers(f"http://127.0.0.1:{server.port}")
    finally:
        server.kill()
    assert set(answers) == {"full prefill", "full reuse", "blend"}
    assert all(answers.values())
    code = "import hf_blend; print(hf_blend.__file__)"
    library = str(server.folder / "hf_blend" / "__init__.py")
    assert output_of([sys.executable, "-c", code], server.folder).split() == [library]


SHIPPED = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "hf_blend", "cli", "evaluation")
REDUCED = {  # what would take many minutes or never end, in little
    "hf-blend demo": "--check",
    "hf-blend serve": "--help",
    "hf-blend store rm --all": "--help",
}
BUILD = (sys.executable, "-P", "-m", "build", "-q", "--no-isolation")


def commands_of_the_readme():
    """Every command of ours in the README, in a block or in running text."""
    text = (ROOT / "README.md").read_text("utf-8")
    return sorted(set(re.findall(r"(?:^\$ |`)(hf-blend [^`\n]+)", text, re.MULTILINE)))


def output_of(command, folder, **settings):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, **settings)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def copied_to(folder):
    """A copy of all of this checkout that is shipped."""
    folder.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def clean_environment(home):
    """The Python of a new environment without hf_blend; what that needs is borrowed from this one."""
    output_of([sys.executable, "-m", "venv", "--without-pip", home], home.parent)
    (packages,) = (home / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist of this checkout, built by `python -m build` from a copy."""
    source = copied_to(tmp_path_factory.mktemp("built") / "source")
    output_of([*BUILD, "--outdir", source / "dist", source], source)
    return {path.suffix: path for path in (source / "dist").iterdir()}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder of the programs of a new environment in which the wheel is installed."""
    home = tmp_path_factory.mktemp("clean")
    python = clean_environment(home / "venv")
    output_of([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", built[".whl"]], home)
    return python.parent


@pytest.mark.slow
def test_sdist_makes_same_wheel_which_holds_every_module(built, tmp_path):
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    output_of([*BUILD, "-w", "--outdir", tmp_path / "again", source], tmp_path)
    (again,) = (tmp_path / "again").glob("*.whl")
    files = sorted(zipfile.ZipFile(built[".whl"]).namelist())
    assert sorted(zipfile.ZipFile(again).namelist()) == files
    modules = {file for file in files if ".dist-info/" not in file}
    assert {file.partition("/")[0] for file in modules} == {"hf_blend"}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert str(Path(*package.split("."), path.relative_to(ROOT / folder))) in modules
    assert "hf_blend/py.typed" in modules
    assert "hf_blend/evaluation/demo/page.css" in modules


@pytest.mark.parametrize(
    "way", [["."], ["--config-settings", "editable_mode=compat", "-e", "."]], ids=["plain", "editable"]
)
def test_install_is_imported_from_every_folder(way, tmp_path):
    clone = copied_to(tmp_path / "hf_blend")  # the folder that git clone makes, in which no __init__.py is
    python = clean_environment(tmp_path / "venv")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    output_of([sys.executable, "-m", "pip", "--python", python, "install", "-q", *offline, *way], clone)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import hf_blend; from hf_blend.cli.main import commands; print(hf_blend.BlendConfig.__name__)"
    for folder in (tmp_path, clone, elsewhere):
        assert output_of([python, "-c", code], folder, env=environment) == "BlendConfig\n"
    assert output_of([python.parent / "hf-blend", "--help"], tmp_path, env=environment)


SUBPACKAGES = """
import hf_blend.cli.main, hf_blend.evaluation.tasks.needle, hf_blend.plugins
from importlib.util import find_spec
print([name for name in ("app", "benchmarks", "docs", "examples", "tests") if find_spec(f"hf_blend.{name}")])
print("evaluation.tasks" in hf_blend.plugins.kinds(), "needle" in hf_blend.plugins.describe("evaluation.tasks"))
"""


def test_clone_has_cli_and_evaluation_as_its_only_subpackages(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = output_of([sys.executable, "-P", "-c", SUBPACKAGES], tmp_path, env=environment)
    assert found.split("\n")[:2] == ["[]", "True True"]


@pytest.mark.slow
def test_installed_wheel_is_what_is_imported(installed, tmp_path):
    code = "import hf_blend, hf_blend.cli.main, hf_blend.evaluation; print(hf_blend.__file__, hf_blend.__version__)"
    file, version = output_of([installed / "python", "-c", code], tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert version == __version__


@pytest.mark.slow
@pytest.mark.parametrize("line", commands_of_the_readme())
def test_readme_command_runs(line, installed, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_text("Rolf works as the miller indeed.\n")
    handbook = Path("hf_blend", "bundled", "handbook")
    shutil.copytree(ROOT / handbook, tmp_path / handbook)
    pages = shlex.join(map(str, sorted((tmp_path / handbook).glob("*.md"))))
    words = shlex.split(f"{line} {REDUCED.get(line, '')}".replace(f"{handbook}/*.md", pages))
    environment = {**os.environ, "HF_BLEND_HOME": str(tmp_path / "home"), "PATH": f"{installed}:{os.environ['PATH']}"}
    output_of([installed / words[0], *words[1:]], tmp_path, env=environment)
