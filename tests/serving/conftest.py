# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Servers in threads of the tests', with a small random model that chats."""

import copy
import json
import threading
from contextlib import contextmanager

import httpx
import pytest

from hf_blend import ChunkStore
from hf_blend.tenants import Tenant
from tests.chat_templates import CHATML, user
from tests.servers import wait_for

serving = pytest.importorskip("hf_blend.serving.app", reason="pip install hf-blend[serve]")


class Running:
    """A server that answers."""

    def __init__(self, url, worker):
        self.url = url
        self.worker = worker

    def post(self, path, body, key="none", **headers):
        """Send a request as any program does."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"} | headers
        return httpx.post(f"{self.url}{path}", content=content, headers=headers, timeout=60)

    def chat(self, messages, key="none", **fields):
        """Ask greedily for a chat's next message."""
        if isinstance(messages, str):
            messages = [user(messages)]
        body = {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}
        return self.post("/v1/chat/completions", body, key)


@pytest.fixture(scope="session")
def chatting(models):
    """A small random model, and its tokenizer with a chat template."""
    model, tokenizer = models["spaces"]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML
    return model, tokenizer


@pytest.fixture
def serve(chatting):
    """Give a context manager that runs a server: limits, tenants, and settings of `BlendCache`."""
    from hf_blend.serving.run import bind, make_server, url_of
    from hf_blend.serving.wire import RequestLimits
    from hf_blend.serving.worker import ModelWorker

    @contextmanager
    def run(limits=None, tenants=None, model=None, **settings):
        limits = RequestLimits(**(limits or {}))
        tenants = tenants or [Tenant()]
        stores = {tenant.name: ChunkStore.open("memory://", namespace=tenant.name) for tenant in tenants}
        worker = ModelWorker(model or chatting[0], chatting[1], stores, limits, **settings)
        listener = bind("127.0.0.1", 0)
        server = make_server(serving.make_app(worker, "tiny", tenants, limits))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: worker.is_ready, "the start")
            yield Running(url_of(listener), worker)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()

    return run
