# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The model that vLLM serves, what it is asked about, and when two answers are the same."""

import json
from typing import Any

import pytest

from tests.conftest import PUBLISHED

TIE = 1e-3  # of log probability; vLLM's kernels and transformers' differ by less than 1e-4


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """SmolLM2 and its tokenizer, and the folder that vLLM loads."""
    from hf_blend.evaluation.bundled import load_model

    smollm2, tokenizer = load_model(None)
    smollm2 = smollm2.float()
    folder = tmp_path_factory.mktemp("model")
    smollm2.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return smollm2, tokenizer, str(folder)


@pytest.fixture(scope="session")
def texts() -> tuple[list[str], list[str]]:
    """Passages of HotpotQA where the published file is, else of the handbook; and questions about them."""
    passages = []
    path = PUBLISHED / "hotpotqa_natural.jsonl"
    if path.exists():
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[:8]]
        for row in rows:
            passages += row["chunks"]
    else:
        from hf_blend.evaluation.bundled import handbook_pages, handbook_questions

        rows = handbook_questions()
        for page in handbook_pages().values():
            passages += [part for part in page.split("\n\n") if len(part) > 200]
    unique = dict.fromkeys(passage[:320].strip() for passage in passages)
    return list(unique)[:24], [row["question"] for row in rows]


def differing(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[Any]:
    """The answers that differ where the two best tokens were not as good as equal."""
    different = []
    for number, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        tokens = answer["tokens"]
        if tokens == other["tokens"]:
            continue
        pairs = enumerate(zip(tokens, other["tokens"], strict=False))
        first = next((index for index, (left, right) in pairs if left != right), None)
        if first is None or answer["gaps"][first] > TIE:
            different.append((number, tokens, other["tokens"]))
    return different
