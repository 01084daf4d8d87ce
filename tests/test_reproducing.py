# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/reproduce.py` refuses what it cannot make a paper's figures of."""

import pytest
from papers.cacheblend import data_files

from hf_blend.errors import ConfigError
from hf_blend.evaluation.answering import blend_config


def test_folder_without_task_and_layer_that_is_no_number_are_refused(tmp_path):
    (tmp_path / "news.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"no JSONL file for any of musique.*musique\.jsonl"):
        data_files(tmp_path, ("musique",))
    with pytest.raises(ConfigError, match="check_layer has 'first', expected a layer"):
        blend_config("kv-deviation:check_layer=first")
