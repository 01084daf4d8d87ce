# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the README says is so: its numbers come from the committed results, its links and commands exist."""

import json
import re
from pathlib import Path

import pytest
from tables import filled

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def test_the_numbers_in_the_text_are_those_of_the_committed_results():
    short = set(result("break_even")["break_even_tokens"].values())
    assert f"from about {min(short)} tokens on" in " ".join(README.split())


def example():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return code


@pytest.mark.parametrize("ratio", [None, 1.0])
def test_the_first_example_answers_and_like_stock_at_ratio_1(ratio, smollm2, tmp_path, monkeypatch, capsys):
    model, tokenizer = smollm2
    monkeypatch.chdir(tmp_path)
    documents = ["The light of Skerry is kept by Una Moss.", "A lantern costs four pounds."]
    given = {"model": model, "tokenizer": tokenizer, "documents": documents, "question": "Who keeps the light?"}
    settings = "" if ratio is None else f", recompute_ratio={ratio}"
    exec(compile(example().replace("(model, store)", f"(model, store{settings})"), "README", "exec"), given)
    text, report = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert text.strip()
    assert "recomputed" in report
    if ratio == 1.0:
        rendered = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(given["messages"], **rendered)
        stock = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
        assert text == tokenizer.decode(stock, skip_special_tokens=True)


def test_the_figures_behind_the_advice_are_those_of_the_file(tmp_path):
    found = {"model": "m", "half": "both", "kl_first": 0.17, "n": 9, "low": 0.28, "high": 0.47, "ttft_ms": 1500}
    rows = [
        {**found, "task": "a", "selector": "random", "charged": 0.151, "kl": 0.98, "target": 0.15},
        {**found, "task": "a", "selector": "boundary", "charged": 0.151, "kl": 0.37, "target": 0.15},
        {**found, "task": "b", "selector": "boundary", "charged": 0.139, "kl": 0.33, "target": 0.15, "ttft_ms": 900},
        {**found, "task": "b", "selector": "boundary", "charged": 0.5, "kl": 0.99, "target": 0.15, "half": "report"},
        {**found, "task": "a", "selector": "none", "charged": 0.0, "kl": 1.0, "target": 0.0},
        {**found, "task": "a", "selector": "boundary", "charged": 0.2, "kl": 0.1, "target": 0.2},
    ]
    (tmp_path / "real_selectors.json").write_text(json.dumps({"rows": rows}))
    assert filled("<!--table:choosing-->\nold\n<!--end-->", tmp_path).splitlines()[1:-1] == [
        "| selector | charged | m, a, n = 9 | m, b, n = 9 |",
        "|---|---|---|---|",
        "| full reuse | 0 % | 1.00 [0.28, 0.47], first 0.17; 1.5 s |  |",
        "| `boundary` | 14 to 15 % | 0.37 [0.28, 0.47], first 0.17; 1.5 s | 0.33 [0.28, 0.47], first 0.17; 0.9 s |",
        "| `random` | 15 % | 0.98 [0.28, 0.47], first 0.17; 1.5 s |  |",
    ]
