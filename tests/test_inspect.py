# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is said about the inside of a prompt is so."""

import pytest

from hf_blend import ChunkStore
from hf_blend.errors import PromptError
from hf_blend.evaluation.inspecting import Inspector, draw, rank_correlation


@pytest.fixture(scope="module")
def found(shared_model, pieces, untouched):
    class Tokenizer:
        bos_token_id = pad_token_id = 1

        @staticmethod
        def decode(ids):
            return f"t{ids[0]}"

    with untouched(shared_model()):
        inspector = Inspector(shared_model(), Tokenizer, ChunkStore.open("memory://"), pieces())
        return inspector.look(["kv-deviation", "boundary", "random"], 0.2, (0.0, 0.5, 1.0))


def test_what_is_found_is_of_every_layer_selector_and_ratio(found):
    assert max(found.deviation[0]) < 1e-5
    assert all(max(row) > 0.01 for row in found.deviation[1:])
    assert all(len(row) == len(found.tokens) == len(found.columns) for row in found.deviation)
    assert list(found.chosen) == ["kv-deviation", "boundary", "random"]
    assert {sum(chosen) for chosen in found.chosen.values()} == {-(-len(found.tokens) // 5)}
    none, half, whole = found.attention_deviation.values()
    assert whole < 1e-4 < half < none
    assert len(found.sparsity) == len(found.deviation)
    assert all(0 < share <= 1 for share in found.sparsity)


def test_rank_correlation_by_hand():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 400]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert rank_correlation([1, 2, 2, 4], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_a_prompt_of_which_nothing_is_reused_is_refused(shared_model, pieces):
    one = {**pieces(), "chunks": pieces()["chunks"][:1], "prefix": [1]}
    with pytest.raises(PromptError, match="two chunks"):
        Inspector(shared_model(), None, ChunkStore.open("memory://"), one)


def test_the_picture_is_drawn(found, tmp_path):
    pytest.importorskip("matplotlib")
    draw(found, tmp_path / "inside.png")
    assert (tmp_path / "inside.png").read_bytes().startswith(b"\x89PNG")
