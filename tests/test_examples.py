# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every program in examples/ runs, offline, and ends well."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from hf_blend import ChunkStore
from tests.chat_templates import ASKED, CHATML, DOCUMENTS, small_tokenizer

FOLDER = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.usefixtures("small_smollm2")
@pytest.mark.parametrize("program", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_the_example_runs_and_says_something(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_folder_for_custom_generate_takes_messages(tiny_model):
    tokenizer = small_tokenizer("spaces")
    model = tiny_model(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=2048)
    folder = Path(__file__).resolve().parent.parent / "examples" / "custom_generate" / "custom_generate"
    generate = runpy.run_path(str(folder / "generate.py"))["generate"]
    store, settings = ChunkStore.open("memory://"), {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    given = {"tokenizer": tokenizer, "messages": [ASKED], "documents": DOCUMENTS, "recompute_ratio": 1.0}
    tokenizer.chat_template = CHATML
    try:
        output = generate(model, store=store, **given, **settings)
        expected = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    finally:
        tokenizer.chat_template = None
    assert torch.equal(output, model.generate(expected, **settings))
    assert len(store) == 4
