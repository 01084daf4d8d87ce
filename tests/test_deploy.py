# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/: what they call exists, and programs that read them accept them where they are installed."""

import configparser
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml

from hf_blend.cli.main import functions
from hf_blend.errors import UnsupportedModelError
from tests.conftest import IS_OLDEST, skip_in_the_oldest

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"


def manifest():
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def options():
    from hf_blend.cli import serve

    return {f"--{name.replace('_', '-')}" for name in inspect.signature(functions(serve)["serve"]).parameters}


def test_every_option_and_variable_that_is_used_exists():
    text = "\n".join(path.read_text() for path in DEPLOY.iterdir())
    variables = {f"--{name.lower().replace('_', '-')}" for name in re.findall(r"HF_BLEND_SERVE_(\w+)", text)}
    start = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    words = {word for word in shlex.split(start) if word.startswith("--")}
    command = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]["command"]
    pods = [one["spec"]["template"]["spec"] for one in manifest() if one["kind"] == "StatefulSet"]
    args = [word for pod in pods for one in pod["containers"] for word in one.get("args", ())]
    used = variables | words | {word for word in (*command, *args) if word.startswith("--")}
    assert used <= options()
    assert len(used) >= 6


@pytest.mark.skipif(not IS_OLDEST, reason="what serving needs is there")
def test_serving_is_refused_by_name_where_transformers_lacks_what_it_needs():
    with pytest.raises(UnsupportedModelError, match=r"transformers 5\.17\.\d lacks .* Install transformers 5\.23"):
        importlib.import_module("hf_blend.serving.run")


def test_stopping_takes_less_time_than_the_unit_and_the_container_give():
    skip_in_the_oldest("continuous batching lacks what serving needs")
    from hf_blend.serving.run import LAST_S, serve
    from hf_blend.serving.service import Service

    drain = inspect.signature(serve).parameters["patience_s"].default + LAST_S
    close = inspect.signature(Service.close).parameters["patience_s"].default
    unit = int(re.search(r"TimeoutStopSec=(\d+)", (DEPLOY / "hf-blend.service").read_text())[1])
    grace = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]["stop_grace_period"]
    assert drain + close < min(unit, int(grace.removesuffix("s")))


def test_the_image_is_made_of_files_and_extras_that_exist_and_holds_every_package():
    text = (DEPLOY / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    folders = {entry.split(" = ")[1] for entry in setup["options"]["package_dir"].split("\n") if entry}
    assert folders <= {*copied}
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert {*extras.split(",")} <= {*setup["options.extras_require"]}
    assert [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
