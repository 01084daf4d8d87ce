# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A config is frozen, refuses what makes no sense, round-trips through JSON, and spends exactly its ratio."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

from hf_blend import BlendConfig, ConfigError


def test_config_is_frozen_hashable_and_does_not_follow_dict_it_was_made_from():
    options = {"blocks": [1, {"width": 2}], "b": None}
    config = BlendConfig(selector_options=options, check_layer=3)
    with pytest.raises(FrozenInstanceError):
        config.seed = 1
    with pytest.raises((TypeError, AttributeError)):
        config.selector_options.update(blocks=1)
    with pytest.raises((TypeError, AttributeError)):
        config.selector_options["blocks"][1].update(width=3)
    twin = BlendConfig(selector_options={"b": None, "blocks": (1, {"width": 2})}, check_layer=3)
    options["blocks"].append(2)
    assert config == twin
    assert config == copy.deepcopy(config)
    assert config == pickle.loads(pickle.dumps(config))
    assert hash(config) == hash(twin)


FULL = BlendConfig(
    recompute_ratio=0.3,
    selector="random",
    selector_options={"a": [1, 2.5, None, {"b": "c"}], "d": False},
    check_layer=4,
    chunk_prefix_ids=(1, 7),
    allow_unverified=True,
    seed=3,
)


@pytest.mark.parametrize("config", [BlendConfig(), FULL])
def test_to_json_and_from_dict_bring_config_back(config):
    document = json.loads(config.to_json())
    assert set(document) == {entry.name for entry in fields(BlendConfig)}
    again = BlendConfig.from_dict(document)
    assert again == config
    assert again.to_json() == config.to_json()


def test_from_dict_takes_part_and_refuses_unknown_field_with_near_name():
    assert BlendConfig.from_dict({"seed": 3}) == BlendConfig(seed=3)
    with pytest.raises(ConfigError, match=r"no field 'recompute_rato'\. Did you mean 'recompute_ratio'\?"):
        BlendConfig.from_dict({"recompute_rato": 0.1})


def test_check_layer_beyond_model_is_refused():
    BlendConfig(check_layer=3).refuse_depth(4)
    with pytest.raises(ConfigError, match=r"check_layer is 4, but the model has 4 layers, 0 … 3\. Give a check layer"):
        BlendConfig(check_layer=4).refuse_depth(4)
