# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A vLLM without a name that the connector uses is refused, and the error names it. Nothing here needs vLLM."""

import dataclasses
import sys
import types

import pytest

import hf_blend.integrations.vllm as package
from hf_blend.errors import ConfigError
from hf_blend.integrations.vllm.interface import (
    check_version,
    missing_attributes,
    missing_fields,
    missing_methods,
    refuse_missing,
)


class Base:
    """What vLLM's base class is to the connector."""

    def start_load(self, context, **kwargs):
        """Load."""

    def get_tokens(self, request, computed):
        """Count."""

    @classmethod
    def build_stats(cls, data=None):
        """Build."""


class Connector(Base):
    def start_load(self, context):
        """Load."""

    @classmethod
    def build_stats(cls, data=None):
        """Build."""

    def _private(self, anything):
        """Is none of vLLM's."""


class OtherName(Base):
    def get_matched_tokens(self, request, computed):
        """Is never called."""


class OtherOrder(Base):
    def get_tokens(self, computed, request):
        """Is called with the other's arguments."""


class OtherParameter(Base):
    @classmethod
    def build_stats(cls, data=None, engine=0):
        """Is called without the engine."""


@pytest.mark.parametrize(
    ("connector", "missing"),
    [
        (Connector, []),
        (OtherName, ["Base.get_matched_tokens(request, computed)"]),
        (OtherOrder, ["Base.get_tokens(computed, request)"]),
        (OtherParameter, ["Base.build_stats(data, engine)"]),
    ],
)
def test_missing_methods_are_those_that_base_has_not(connector, missing):
    assert missing_methods(Base, [connector]) == missing


def test_missing_fields_are_those_that_dataclass_has_not():
    kind = dataclasses.make_dataclass("SchedulerOutput", ["scheduled_new_reqs"])
    assert missing_fields(kind, ["scheduled_new_reqs", "num_tokens"]) == ["SchedulerOutput.num_tokens"]


def test_missing_attributes_are_found_at_every_depth():
    model = types.SimpleNamespace(dtype="float32", revision=None)
    config = types.SimpleNamespace(model_config=model)
    paths = ["model_config.dtype", "model_config.revision", "model_config.tokenizer", "cache_config.block_size"]
    assert missing_attributes(config, paths) == [
        "SimpleNamespace.model_config.tokenizer",
        "SimpleNamespace.cache_config.block_size",
    ]


def test_refusal_names_all_that_is_missing_and_what_to_install():
    refuse_missing("0.33.0", [])
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.9 has no A\.b, C\.d\(e\), .* expected .* 0\.32 or .* Install"):
        refuse_missing("0.33.9", ["A.b", "C.d(e)"])


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1+cpu", "0.33.2.dev5"])
def test_version_whose_interface_was_read_is_allowed(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.3.2", "0.31.2", "0.34.0rc1", "0.330.0", "1.33.0", "dev"])
def test_version_whose_interface_was_not_read_is_refused(version):
    with pytest.raises(ConfigError, match=r"expected vLLM 0\.32 or vLLM 0\.33"):
        check_version(version)


def test_name_that_cannot_be_imported_from_vllm_is_refused_by_name(monkeypatch):
    vllm = types.ModuleType("vllm")
    vllm.__version__ = "0.33.0"
    vllm.__path__ = []
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.delitem(sys.modules, "hf_blend.integrations.vllm.connector", raising=False)
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.0 has no vllm\.distributed.*expected the interface of"):
        _ = package.BlendConnector
