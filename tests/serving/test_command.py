# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`hf-blend serve` refuses what it cannot do before it reads a model, and the files of deploy/ name what it has."""

import inspect
import json
import re
import socket
from pathlib import Path

import pytest

from hf_blend.cli.serve import serve as command
from hf_blend.errors import ConfigError
from hf_blend.tenants import read_tenants

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
KEY = "a-long-random-key"
GOOD = {"name": "search", "api_key": KEY}

REFUSED = {
    "no api_key of 16 or more": ["--api-key", "short"],
    "each tenant has its own key": ["--api-key", KEY, "--tenants", "tenants.json"],
    "cannot be read": ["--tenants", "none.json"],
    "no plugin named": ["--selector", "nothing"],
}
TENANTS = {
    "cannot be read": "{",
    "names no tenant": "[]",
    "expected fields among name, api_key, secret": [{**GOOD, "quota": 5}],
    "no api_key of 16 or more": [{"name": "search", "api_key": "short"}],
    "two tenants in .* have the same api_key": [GOOD, {**GOOD, "name": "support"}],
    "not 64 or more hex digits": [{**GOOD, "secret": "ab" * 31}],
}


@pytest.mark.parametrize("text", REFUSED)
def test_serve_refuses_options(text, run, here):
    (here / "tenants.json").write_text(json.dumps({"tenants": [GOOD]}))
    code, _, said = run("serve", "--model", "no-such-model", *REFUSED[text])
    assert code == 2
    assert text in " ".join(said.replace("│", " ").split())


def test_serve_refuses_port_that_is_taken(run, here):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, said = run("serve", "--model", "no-such-model", "--port", port)
    assert code == 2
    assert f"port {port} of 127.0.0.1 is in use" in said


@pytest.mark.parametrize("text", TENANTS)
def test_read_tenants_refuses(text, tmp_path):
    rows = TENANTS[text]
    path = tmp_path / "tenants.json"
    text_of_rows = rows if isinstance(rows, str) else json.dumps({"tenants": rows})
    path.write_text(text_of_rows)
    with pytest.raises(ConfigError, match=text):
        read_tenants(path)


def test_read_tenants_keeps_keys_out_of_logs(tmp_path):
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": [{**GOOD, "secret": "ab" * 32}]}))
    (tenant,) = read_tenants(path)
    assert tenant.name == "search"
    assert tenant.api_key == KEY
    assert tenant.secret == b"\xab" * 32
    assert repr(tenant) == "Tenant('search')"


def test_deploy_names_options_that_exist():
    options = {name.upper() for name in inspect.signature(command).parameters}
    text = "\n".join(path.read_text("utf-8") for path in DEPLOY.iterdir())
    variables = set(re.findall(r"HF_BLEND_SERVE_(\w+)", text))
    (line,) = re.findall(r"^ExecStart=.*", text, re.MULTILINE)
    words = {word.upper().replace("-", "_") for word in re.findall(r" --([\w-]+)", line)}
    assert {"API_KEY", "STORE", "HOST", "MODEL"} <= variables <= options
    assert {"STORE", "TENANTS"} <= words <= options


def test_server_stops_sooner_than_deploy_allows():
    run_module = pytest.importorskip("hf_blend.serving.run", reason="pip install hf-blend[serve]")
    unit = (DEPLOY / "hf-blend.service").read_text()
    compose = (DEPLOY / "compose.yaml").read_text()
    (unit_s,) = re.findall(r"TimeoutStopSec=(\d+)", unit)
    (grace_s,) = re.findall(r"stop_grace_period: (\d+)s", compose)
    assert int(unit_s) >= run_module.STOP_S + 10
    assert int(grace_s) >= run_module.STOP_S + 10
