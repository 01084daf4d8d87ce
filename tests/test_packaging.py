# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is installed is what is here and nothing else, also as wheel, as sdist and as the Space in app/."""

import ast
import configparser
import importlib.util
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

from hf_blend.cli.main import commands
from hf_blend.version import __version__
from tests.servers import start_space

ROOT = Path(__file__).resolve().parent.parent
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
    lines = [line.strip() for text in texts for line in text.split("\n") if line and not line.startswith("#")]
    return [wanted for wanted in map(Requirement, lines) if wanted.name != "hf-blend"]


def workflow(name: str) -> dict:
    """A workflow of the repository."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8"))


def names(wanted: list[Requirement]) -> set[str]:
    """The distributions that requirements are about."""
    return {canonicalize_name(one.name) for one in wanted}


def extras_of(extra: str) -> set[str]:
    """An extra and those of our own that it names."""
    ours = [Requirement(line) for line in EXTRAS[extra].split("\n") if line.startswith("hf-blend[")]
    return {extra}.union(*(extras_of(name) for one in ours for name in one.extras))


PINS = requirements((ROOT / "constraints.txt").read_text("utf-8"))
OLDEST = requirements((ROOT / "constraints-oldest.txt").read_text("utf-8"))
INSTALLED_BY_MAKE = requirements(OPTIONS["install_requires"], *(EXTRAS[name] for name in sorted(extras_of("dev"))))


def test_every_package_data_pattern_matches_something():
    for package, patterns in SETUP["options.package_data"].items():
        folder = ROOT / FOLDERS[package]
        assert all(any(folder.glob(pattern)) for pattern in patterns.split()), (package, patterns)


def test_everything_that_is_imported_is_declared():
    needed = set()
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    needed |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    needed.add((node.module or "").partition(".")[0])
    third_party = {IMPORTED_AS.get(name, name) for name in needed - set(sys.stdlib_module_names) - {"hf_blend"}}
    assert {canonicalize_name(name) for name in third_party} <= names(
        requirements(OPTIONS["install_requires"], *EXTRAS.values())
    )


def test_the_pins_are_exact_and_allowed_and_the_oldest_transformers_is_the_oldest_allowed():
    assert all(str(pin.specifier).startswith("==") for pin in PINS)
    versions = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in PINS}
    for wanted in INSTALLED_BY_MAKE:
        assert versions[canonicalize_name(wanted.name)] in wanted.specifier
    (pin,) = [one for one in OLDEST if one.name == "transformers"]
    (wanted,) = [one for one in INSTALLED_BY_MAKE if one.name == "transformers"]
    version = str(pin.specifier)[2:]
    assert version in wanted.specifier
    assert f">={version.removesuffix('.0')}" in str(wanted.specifier)
    assert names(OLDEST) <= names(PINS), "only what differs from the tested versions"


def test_the_workflow_tests_every_python_and_the_oldest_and_pinned_transformers():
    matrix = workflow("tests")["jobs"]["test"]["strategy"]["matrix"]
    named = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert matrix["python"] == named
    pins = [str(pin.specifier)[2:] for pin in (*OLDEST, *PINS) if pin.name == "transformers"]
    assert {pin.rpartition(".")[0] for pin in pins} <= {*matrix["transformers"]}


def test_workflows_call_only_targets_of_make_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        steps = [step for job in workflow(path.stem)["jobs"].values() for step in job["steps"]]
        called = re.findall(r"\bmake ([a-z-]+)", "\n".join(step.get("run", "") for step in steps))
        assert {*called} <= targets, path.name


def test_the_release_is_published_without_a_token():
    publish = workflow("release")["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")


def test_the_citation_and_the_hook_of_ruff_name_the_versions_that_are_here():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == __version__
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    (ruff,) = [pin for pin in PINS if pin.name == "ruff"]
    assert hooks[0]["rev"] == f"v{str(ruff.specifier)[2:]}"


def test_mypy_is_strict_with_modules_that_exist():
    (section,) = [name for name in SETUP.sections() if name.startswith("mypy-hf_blend")]
    for module in section.removeprefix("mypy-").split(","):
        assert importlib.util.find_spec(module), module
        path = Path(importlib.util.find_spec(module).origin)
        assert module == "hf_blend" or path.name != "__init__.py", f"{module}: only its __init__ would be checked"


def test_make_calls_only_commands_and_programs_that_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert set(re.findall(r"/hf-blend ([a-z-]+)", makefile)) <= set(commands())
    assert all((ROOT / program).is_file() for program in re.findall(r"/python (\S+\.py)", makefile))


def test_the_packages_in_setup_cfg_are_the_folders_with_modules():
    found = set()
    for package, folder in FOLDERS.items():
        inner = {path.parent.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")}
        found |= {".".join([package, *one.parts]) for one in inner if "bundled" not in one.parts}
    assert found == set(OPTIONS["packages"].split())


def test_the_space_brings_all_that_the_library_needs_in_the_tested_versions():
    card = SpaceCard((ROOT / "app" / "README.md").read_text("utf-8")).data.to_dict()
    assert card["sdk"] == "gradio"
    assert (ROOT / "app" / card["app_file"]).is_file()
    brought = requirements((ROOT / "app" / "requirements.txt").read_text("utf-8"))
    assert set(map(str, brought)) <= set(map(str, PINS))
    assert f"gradio=={card['sdk_version']}" in map(str, PINS)
    assert names(requirements(OPTIONS["install_requires"], EXTRAS["demo"], EXTRAS["rag"])) == names(brought)


@pytest.mark.slow
@pytest.mark.usefixtures("small_smollm2")
def test_the_space_answers_from_its_own_folder(tmp_path):
    from hf_blend.evaluation.demo.request import first_answers

    server = start_space(tmp_path / "space")
    try:
        answers = first_answers(f"http://127.0.0.1:{server.port}", "")
    finally:
        server.kill()
    assert set(answers) == {"full prefill", "full reuse", "blend"}
    assert all(answers.values())
    code = "import app, hf_blend; print(hf_blend.__file__, app.demo.models.takes_folders)"
    done = subprocess.run([sys.executable, "-c", code], cwd=server.folder, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(server.folder / "hf_blend" / "__init__.py"), "False"]


SHIPPED = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "hf_blend", "cli", "evaluation")
REDUCED = {  # what would take many minutes or never end, in little
    "hf-blend bench ttft": "--shape tiny --chunks 3 --chunk-tokens 64 --question-tokens 8 --rounds 1",
    "hf-blend demo": "--check",
    "hf-blend serve": "--help",
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


def copied(folder):
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
    run([sys.executable, "-m", "venv", "--without-pip", home], home.parent)
    (own,) = (home / "lib").glob("python*/site-packages")
    (own / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist of this checkout, built by `python -m build` from a copy."""
    pytest.importorskip("build", reason="build is not installed: pip install build")
    source = copied(tmp_path_factory.mktemp("built") / "source")
    run([*BUILD, "--outdir", source / "dist", source], source)
    return {path.suffix: path for path in (source / "dist").iterdir()}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder of the programs of a new environment; what hf_blend needs is borrowed from this one."""
    home = tmp_path_factory.mktemp("clean")
    python = clean_environment(home / "venv")
    run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", built[".whl"]], home)
    return python.parent


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(built, tmp_path):
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run([*BUILD, "-w", "--outdir", tmp_path / "again", source], tmp_path)
    (again,) = (tmp_path / "again").glob("*.whl")
    held = [sorted(zipfile.ZipFile(one).namelist()) for one in (built[".whl"], again)]
    assert held[0] == held[1]
    modules = {one for one in held[0] if ".dist-info/" not in one}
    assert {one.partition("/")[0] for one in modules} == {"hf_blend"}
    for package, folder in FOLDERS.items():
        home = Path(*package.split("."))
        assert {str(home / path.relative_to(ROOT / folder)) for path in (ROOT / folder).rglob("*.py")} <= modules
    assert "hf_blend/py.typed" in held[0]
    page = {f"hf_blend/evaluation/demo/{name}" for name in ("figure.css", "page.css", "quality.svg")}
    assert page <= set(held[0])


SUBPACKAGES = """
import hf_blend.cli.main, hf_blend.evaluation.tasks.needle, hf_blend.plugins
from importlib.util import find_spec
print([name for name in ("app", "benchmarks", "docs", "examples", "tests") if find_spec(f"hf_blend.{name}")])
print("evaluation.tasks" in hf_blend.plugins.kinds(), "needle" in hf_blend.plugins.describe("evaluation.tasks"))
"""


def test_of_a_clone_only_cli_and_evaluation_are_subpackages(tmp_path):
    command = [sys.executable, "-P", "-c", SUBPACKAGES]
    assert run(command, tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}).split("\n")[:2] == ["[]", "True True"]


@pytest.mark.slow
@pytest.mark.parametrize("has_links", [True, False])
def test_of_an_editable_install_only_cli_and_evaluation_are_subpackages(has_links, tmp_path):
    source, home = copied(tmp_path / "source"), tmp_path / "venv"
    for name in () if has_links else ("cli", "evaluation"):  # as git writes a link on Windows
        (source / "hf_blend" / name).unlink()
        (source / "hf_blend" / name).write_text(f"../{name}")
    python = clean_environment(home)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation"]
    run([*pip, "-e", source], tmp_path)
    code = f"{SUBPACKAGES}\nassert hf_blend.__file__.startswith({str(source)!r}), hf_blend.__file__"
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert run([python, "-P", "-c", code], tmp_path, env=outside).split("\n")[:2] == ["[]", "True True"]


@pytest.mark.slow
def test_what_is_imported_is_what_was_installed(installed, tmp_path):
    code = "import hf_blend, hf_blend.cli.main, hf_blend.evaluation; print(hf_blend.__file__, hf_blend.__version__)"
    file, version = run([installed / "python", "-c", code], tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert version == __version__


@pytest.mark.slow
def test_types_are_found_by_a_checker(installed, tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")
    (tmp_path / "user.py").write_text("from hf_blend.errors import suggest\nreveal_type(suggest('a', ['b']))\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", installed / "python", "--follow-imports=silent"]
    assert 'Revealed type is "str"' in run([*command, "user.py"], tmp_path).replace("builtins.", "")


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_of_the_readme_runs(line, installed, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_text("Rolf works as the miller indeed.\n")
    words = shlex.split(f"{line} {REDUCED.get(line, '')}")
    environment = {**os.environ, "HF_BLEND_HOME": str(tmp_path / "home"), "PATH": f"{installed}:{os.environ['PATH']}"}
    run([installed / words[0], *words[1:]], tmp_path, env=environment)
