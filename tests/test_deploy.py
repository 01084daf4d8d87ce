# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/: what they call exists, and programs that read them accept them where they are installed."""

import ast
import inspect
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from hf_blend.cli.main import functions

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"


def options():
    from hf_blend.cli import serve

    return {f"--{name.replace('_', '-')}" for name in inspect.signature(functions(serve)["serve"]).parameters}


@pytest.fixture
def container():
    """Instructions of the Containerfile, one a line."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Containerfile").read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_every_option_and_variable_that_is_used_exists(container):
    text = "\n".join(path.read_text() for path in DEPLOY.iterdir())
    variables = {f"--{name.lower().replace('_', '-')}" for name in re.findall(r"HF_BLEND_SERVE_(\w+)", text)}
    start = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    words = {word for word in shlex.split(start) if word.startswith("--")}
    command = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]["command"]
    used = variables | words | {word for word in command if word.startswith("--")}
    assert used <= options()
    assert len(used) >= 6


def test_the_container_has_extras_that_exist_a_user_and_a_check_that_is_python(container):
    from configparser import ConfigParser

    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (extras,) = re.findall(r'"(\.\[.*?\])"', "\n".join(container))
    assert Requirement(f"hf-blend{extras[1:]}").extras <= set(setup["options.extras_require"])
    assert [line for line in container if line.startswith("USER ")] == ["USER 10001"]
    check = next(line for line in container if line.startswith("HEALTHCHECK"))
    assert "--start-period=" in check
    ast.parse(ast.literal_eval(check.partition("CMD ")[2])[2])
    assert any("whl/cpu torch" in line for line in container)


def test_stopping_takes_less_time_than_the_unit_and_the_container_give():
    from hf_blend.serving.run import LAST_S, serve
    from hf_blend.serving.service import Service

    drain = inspect.signature(serve).parameters["patience_s"].default + LAST_S
    close = inspect.signature(Service.close).parameters["patience_s"].default
    unit = int(re.search(r"TimeoutStopSec=(\d+)", (DEPLOY / "hf-blend.service").read_text())[1])
    grace = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]["stop_grace_period"]
    assert drain + close < min(unit, int(grace.removesuffix("s")))


@pytest.fixture
def resources():
    """What deploy/kubernetes.yaml makes, by kind and name."""
    made = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in made}


def test_what_the_kubernetes_manifest_calls_is_in_it(resources):
    servers = resources["StatefulSet", "hf-blend"]["spec"]
    pod = servers["template"]["spec"]
    (server,) = pod["containers"]
    assert {word for word in server["args"] if word.startswith("--")} <= options()
    stop = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]["stop_grace_period"]
    assert pod["terminationGracePeriodSeconds"] == int(stop.removesuffix("s"))
    inside = {f"{name}.hf-blend.svc.cluster.local" for kind, name in resources if kind == "Service"}
    assert re.search(r"//([\w.-]+):6379", " ".join(server["args"]))[1] in inside
    config = resources["ConfigMap", "balancer"]["data"]["default.conf.template"]
    named = re.findall(r"server (\S+):8000 resolve;", config)
    assert named == [f"hf-blend-{number}.servers.hf-blend.svc.cluster.local" for number in range(servers["replicas"])]
    assert "hash $http_x_documents consistent;" in config
    assert {one["metadata"]["namespace"] for one in resources.values()} == {"hf-blend"}
    made = [one["spec"]["template"] for one in resources.values() if "template" in one.get("spec", {})]
    pods = [one["metadata"]["labels"] for one in made]
    assert all(one["spec"]["selector"] in pods for (kind, _), one in resources.items() if kind == "Service")


def test_systemd_accepts_the_unit(tmp_path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed, which reads units")
    unit = (DEPLOY / "hf-blend.service").read_text().replace("/opt/hf-blend/bin/hf-blend", "/bin/true")
    (tmp_path / "hf-blend.service").write_text(unit)
    done = subprocess.run([program, "verify", str(tmp_path / "hf-blend.service")], capture_output=True, text=True)
    assert "hf-blend.service" not in done.stderr, done.stderr
