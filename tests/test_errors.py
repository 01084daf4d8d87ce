# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Errors are caught by our name and by the built-in one, and say what to do."""

import hf_blend
from hf_blend import errors

FAMILY = {
    "ConfigError": ValueError,
    "PromptError": ValueError,
    "UnsupportedModelError": NotImplementedError,
    "StoreError": OSError,
    "OffloadError": OSError,
    "PluginNotFoundError": LookupError,
    "MissingExtraError": ImportError,
}


def test_each_error_is_ours_and_built_in_one_and_keeps_its_message():
    for name, builtin in FAMILY.items():
        error = getattr(hf_blend, name)
        assert issubclass(error, hf_blend.HfBlendError)
        assert issubclass(error, builtin)
        assert str(error("what, got, expected, do")) == "what, got, expected, do"
    ours = {cls for cls in hf_blend.HfBlendError.__subclasses__() if cls.__module__ == "hf_blend.errors"}
    assert {cls.__name__ for cls in ours} == set(FAMILY)


def test_suggest_names_near_name_and_lists_all():
    for wrong in ("kv_devation", "KV-Deviation", "kvdeviation", "kv-deviaton"):
        said = errors.suggest(wrong, ["none", "kv-deviation"])
        assert said.startswith("Did you mean 'kv-deviation'? Available: ")
    assert errors.suggest("x_y_z_w", ["x-y-z-w"]).startswith("Did you mean 'x-y-z-w'? ")
    assert errors.suggest("zzz", ["b", "a"]) == "Available: a, b."
    assert errors.suggest("zzz", []) == "Available: none."
    assert errors.suggest("zzz", ["a-b", "a_b"]) == "Available: a-b, a_b."
