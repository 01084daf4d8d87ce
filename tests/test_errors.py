# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Errors are caught by our name and by the built-in one, and say what to do."""

import pytest

import hf_blend
from hf_blend import errors

FAMILY = {
    "ConfigError": ValueError,
    "PromptError": ValueError,
    "UnsupportedModelError": NotImplementedError,
    "StoreError": OSError,
    "PluginNotFoundError": LookupError,
    "MissingExtraError": ImportError,
}


@pytest.mark.parametrize(("name", "builtin"), FAMILY.items())
def test_each_error_is_ours_and_the_built_in_one_and_keeps_its_message(name, builtin):
    error = getattr(hf_blend, name)
    assert issubclass(error, hf_blend.HfBlendError)
    assert issubclass(error, builtin)
    assert str(error("what, got, wanted, do")) == "what, got, wanted, do"


def test_the_family_is_complete():
    ours = {cls for cls in hf_blend.HfBlendError.__subclasses__() if cls.__module__ == "hf_blend.errors"}
    assert {cls.__name__ for cls in ours} == set(FAMILY)


@pytest.mark.parametrize("wrong", ["kv_devation", "KV-Deviation", "kvdeviation", "kv-deviaton"])
def test_a_near_name_is_suggested(wrong):
    assert errors.suggest(wrong, ["none", "kv-deviation"]).startswith("Did you mean 'kv-deviation'? Available: ")


def test_a_far_name_gets_the_list_only():
    assert errors.suggest("zzz", ["b", "a"]) == "Available: a, b."
    assert errors.suggest("zzz", []) == "Available: none."


def test_names_are_listed_even_where_two_differ_only_in_their_dash():
    assert errors.suggest("zzz", ["a-b", "a_b"]) == "Available: a-b, a_b."


def test_a_missing_extra_says_who_needs_it_and_how_to_install_it():
    with pytest.raises(hf_blend.MissingExtraError) as caught:
        errors.import_extra("no_such_module_at_all", extra="plot", wanted_by="hf-blend plot")
    assert str(caught.value) == (
        'hf-blend plot needs no_such_module_at_all, which is not installed: pip install "hf-blend[plot]"'
    )


def test_an_extra_that_is_there_is_imported():
    assert errors.import_extra("json", extra="plot", wanted_by="a test").dumps([]) == "[]"
