# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is installed is what is here, and nothing else."""

import ast
import configparser
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_blend.cli.main import commands

ROOT = Path(__file__).resolve().parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", "utf-8")
OPTIONS = SETUP["options"]
FOLDERS = dict(entry.split(" = ") for entry in OPTIONS["package_dir"].split("\n") if entry)
EXTRAS = SETUP["options.extras_require"]
IMPORTED_AS = {"haystack": "haystack-ai", "llama_index": "llama-index-core"}  # import: distribution


def requirements(*texts: str) -> list[Requirement]:
    """Parse requirements, one a line, leaving out comments and our own extras."""
    lines = [line.strip() for text in texts for line in text.split("\n") if line and not line.startswith("#")]
    return [wanted for wanted in map(Requirement, lines) if wanted.name != "hf-blend"]


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


def test_make_calls_only_commands_and_programs_that_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert set(re.findall(r"/hf-blend ([a-z-]+)", makefile)) <= set(commands())
    assert all((ROOT / program).is_file() for program in re.findall(r"/python (\S+\.py)", makefile))


def test_the_wheel_holds_the_packages_their_data_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ["setup.cfg", "pyproject.toml", "README.md", "LICENSE", *FOLDERS.values()]:
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in held} == {"hf_blend"}
    for package, folder in FOLDERS.items():
        home = Path(*package.split("."))
        modules = {str(home / path.relative_to(ROOT / folder)) for path in (ROOT / folder).rglob("*.py")}
        assert modules <= held
    assert "hf_blend/py.typed" in held
