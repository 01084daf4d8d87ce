# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Show full prefill, full reuse and blending in a browser."""

import socket
from typing import Annotated

import typer

from hf_blend.errors import ConfigError, import_extra

from .options import REAL, Device, Dtype
from .output import Json, fail, say, show

__all__ = ["demo"]

Model = Annotated[str, typer.Option(help="Hub id or folder of the model that answers.")]
Host = Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for everybody who reaches this machine.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="The first free one from 7860 on if left out.")]
Check = Annotated[bool, typer.Option("--check", help="Start, answer one question through the page, and end.")]


def demo(
    model: Model = REAL,
    host: Host = "127.0.0.1",
    port: Port = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    check: Check = False,
    json: Json = False,
) -> None:
    """Start the page; needs the extra demo. Nothing that is typed there leaves this machine.

    Examples:
        hf-blend demo --check  # slow
        hf-blend demo --check --json  # slow
        hf-blend demo --model HuggingFaceTB/SmolLM2-135M-Instruct --port 7860  # network
    """
    import_extra("gradio", extra="demo", needed_by="hf-blend demo")
    from hf_blend.evaluation.demo.loaded import load_exact
    from hf_blend.evaluation.demo.page import Demo, serve
    from hf_blend.evaluation.demo.request import first_answers

    _refuse_port(host, port)
    page = Demo(load_exact(model, device, dtype))
    say("Answering the first question, so that the page opens with it.")
    blocks, url = serve(page, host=host, port=port, wait=False)
    try:
        if not check:
            show({"url": url}, as_json=json)
            say("Press Ctrl-C to end it.")
            blocks.block_thread()
            return
        answers = first_answers(url)
        show({"url": url, "answers": answers}, as_json=json)
        if not answers or not all(answers.values()):
            fail(f"the page at {url} gave {answers}, but an answer by each method is expected. Run it with --debug.")
    finally:
        blocks.close(verbose=False)


def _refuse_port(host: str, port: int | None) -> None:
    """Find out whether one may listen there, before a model is read."""
    try:
        socket.create_server((host, port or 0)).close()
    except OSError as error:
        raise ConfigError(
            f"the page cannot listen on {host}, port {port}: {error.strerror or error}. Give another --port, or leave "
            "it out for the first free one from 7860 on; --host is an address of this machine."
        ) from error
