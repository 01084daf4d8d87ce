# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Real servers, each in a process of its own."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Server:
    """A server in a process of its own, on a port that it keeps when it is started again."""

    def __init__(self, command: Callable[[int], list[str]], folder: Path, patience_s: int = 60) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.command = command(self.port)
        self.folder = folder
        self.patience_s = patience_s
        self.start()

    def start(self) -> None:
        """Start it, empty, and wait until it answers; what it says goes to `log` in its folder."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, cwd=self.folder, stdout=log, stderr=log)
        for _ in range(20 * self.patience_s):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.process.poll() is None, f"{self.command} ended with {self.process.returncode}"
            time.sleep(0.05)
        raise AssertionError(f"{self.command} does not answer")

    def kill(self) -> None:
        """End it at once, as a power loss would."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Stop it where it is: connections stay open, and nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)


def wait_for(happened: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until something has happened."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"{what} did not happen"
        time.sleep(0.01)


def start_space(folder: Path) -> Server:
    """Lay out the Space as `make space` does, and start it in its own folder, as Hugging Face does."""
    pytest.importorskip("gradio", reason="gradio is not installed: pip install hf-blend[demo]")
    subprocess.run(["make", "-s", "space", f"SPACE={folder}"], cwd=ROOT, check=True)
    return Server(lambda port: ["env", f"GRADIO_SERVER_PORT={port}", sys.executable, "app.py"], folder, patience_s=300)
