# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is said about the inside of a prompt is so."""

import pytest
import torch

from hf_blend import ChunkStore
from hf_blend.errors import PromptError
from hf_blend.evaluation.inspecting import Inspector, draw, rank_correlation


@pytest.fixture(scope="module")
def found(shared_model, pieces):
    class Tokenizer:
        bos_token_id = pad_token_id = 1

        @staticmethod
        def decode(ids):
            return f"t{ids[0]}"

    inspector = Inspector(shared_model(), Tokenizer, ChunkStore.open("memory://"), pieces())
    return inspector.look(["kv-deviation", "boundary", "random"], 0.2, (0.0, 0.5, 1.0))


def test_stored_kv_is_right_at_layer_0_and_wrong_behind(found):
    assert max(found.deviation[0]) < 1e-5
    assert all(max(row) > 0.01 for row in found.deviation[1:])
    assert all(len(row) == len(found.tokens) == len(found.columns) for row in found.deviation)


def test_each_selector_takes_its_share(found):
    assert list(found.chosen) == ["kv-deviation", "boundary", "random"]
    count = len(found.tokens)
    assert {sum(chosen) for chosen in found.chosen.values()} == {-(-count // 5)}


def test_attention_comes_back_when_all_is_recomputed(found):
    none, half, whole = found.attention_deviation.values()
    assert whole < 1e-4 < half < none


def test_sparsity_is_a_share_of_the_keys(found):
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


def test_looking_leaves_the_model_untouched(tiny_model, untouched, pieces):
    class Tokenizer:
        bos_token_id = pad_token_id = 1
        decode = staticmethod(lambda ids: "t")

    model = tiny_model()
    with untouched(model), torch.no_grad():
        Inspector(model, Tokenizer, ChunkStore.open("memory://"), pieces()).look(["boundary"], 0.1, (0.1,))
