# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The port of a server, and the server that answers there until SIGINT or SIGTERM."""

import copy
import socket
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from ..errors import ConfigError

__all__ = ["bind", "make_server", "url_of"]

MOST_CONNECTIONS = 256
STOP_S = 30  # in which requests under way are answered when the server stops


def bind(host: str, port: int) -> socket.socket:
    """Open a port, 0 for any free one; connections wait from then on until the server is up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"port {port} of {host} is in use, or closed to you. Choose another with --port.") from error


def url_of(listener: socket.socket) -> str:
    """Return the address of a server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: Any, log_requests: bool = False) -> uvicorn.Server:
    """Make a server; `server.run(sockets=[listener])` runs it. A line for each request goes to stderr if asked for."""
    logging = copy.deepcopy(LOGGING_CONFIG)
    logging["handlers"]["access"]["stream"] = "ext://sys.stderr"
    logging["loggers"]["uvicorn.error"]["level"] = "WARNING"
    config = uvicorn.Config(
        app,
        log_config=logging,
        access_log=log_requests,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=STOP_S,
    )
    return uvicorn.Server(config)
