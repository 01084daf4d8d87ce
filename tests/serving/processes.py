# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Servers in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

from worlds import REFERENCE

COMMAND = [sys.executable, "-P", "-m", "hf_blend", "serve"]


def wait_for(happened, what, seconds=60.0):
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"{what} did not happen"
        time.sleep(0.05)


@contextmanager
def server_process(folder, *words):
    """A server of its own process: (process, URL)."""
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log").open("wb")
    command = [*COMMAND, "--store", str(folder / "store"), "--port", "0", "--json", "--cache-tokens", "8192", *words]
    command += [] if "--model" in words else ["--model", REFERENCE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
    try:
        lines = b""
        while b"}" not in lines:
            line = process.stdout.readline()
            assert line, (folder / "log").read_text()
            lines += line
        yield process, json.loads(lines)["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()
            log.close()


def metrics(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as response:
        lines = response.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
