# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM: a KV connector that blends stored chunks into vLLM's blocks; see docs/vllm.md.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "BlendConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "hf_blend.integrations.vllm", "kv_connector_extra_config": {"store": "kv-store"}}'

vLLM is imported when `BlendConnector` is asked for.
"""

from typing import Any

from ...errors import import_extra
from .interface import check_version, refuse_missing
from .plan import plan_salt, request_fields

__all__ = ["BlendConnector", "plan_salt", "register", "request_fields"]


class _KeepsWeights:
    """Tells a linear layer of vLLM to keep its weight as it is, where this connector is to read it."""

    def __get__(self, layer: Any, owner: Any = None) -> bool:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        transfer = None if config is None else config.kv_transfer_config
        return transfer is not None and transfer.kv_connector_module_path == __name__


def register() -> None:
    """Prepare vLLM; it calls this in each of its processes, as the entry point `vllm.general_plugins`.

    On a CPU vLLM replaces the weights of linear layers by packed copies that only its own kernel can read. Its layers
    have an attribute that says not to; they get it here, for engines that use the connector and no others.
    """
    from vllm.model_executor.layers.linear import LinearBase

    LinearBase._cpu_skip_gemm_dispatch = _KeepsWeights()


def __getattr__(name: str) -> Any:
    if name != "BlendConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    version = import_extra("vllm", extra="vllm", needed_by="BlendConnector").__version__
    check_version(version)
    try:
        from .connector import BlendConnector
    except ImportError as error:
        module = error.name or ""
        if not module.startswith("vllm."):
            raise
        refuse_missing(version, [f"{module} as it was ({error})"])
    return BlendConnector
