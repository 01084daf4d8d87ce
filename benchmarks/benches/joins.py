# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much of each stored chunk is reused in a prompt that is one text, for each way of joining and each tokenizer."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_blend import BlendCache, ChunkStore, __version__
from hf_blend.errors import ConfigError
from hf_blend.evaluation.bundled import handbook_questions
from hf_blend.model.fingerprint import fingerprint
from hf_blend.prefill.plan import ChunkOrigin, Plan, Planner, PromptRow
from hf_blend.prompt.text import build_text

__all__ = ["JOINS", "JoinsPlan", "measure_joins", "read_passages"]

JOINS: dict[str, Callable[[Sequence[str]], str]] = {
    "blank line": "\n\n".join,
    "line break": "\n".join,
    "space": " ".join,
    "nothing": "".join,
    "Document [i]: x": lambda texts: "\n".join(f"Document [{at}]: {text}" for at, text in enumerate(texts, 1)),
    "<doc>x</doc>": lambda texts: "".join(f"<doc>{text}</doc>" for text in texts),
}
GOAL = 0.97  # of the tokens of stored chunks


def read_passages(path: str, count: int) -> list[list[str]]:
    """Read the passages of some questions."""
    rows: list[list[str]] = []
    try:
        with Path(path).expanduser().open(encoding="utf-8") as lines:
            for line in itertools.takewhile(lambda _: sum(map(len, rows)) < count, lines):
                rows.append([str(text) for text in json.loads(line)["chunks"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give JSON lines, each with a list 'chunks'.") from error
    return rows


@dataclass(frozen=True)
class JoinsPlan:
    """What is measured: tokenizers by their folders, on the passages of JSON lines or on the bundled handbook."""

    tokenizers: tuple[str, ...]
    passages: str | None = None
    count: int = 300


def measure_joins(plan: JoinsPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Store passages and look for them in prompts, by their ids alone and with their texts named."""
    rows = []
    handbook = [handbook_questions()[0]["chunks"]]
    passages = handbook if plan.passages is None else read_passages(plan.passages, plan.count)
    for folder in plan.tokenizers:
        if progress is not None:
            progress(f"{Path(folder).name}: {sum(map(len, passages))} passages, {len(JOINS)} ways of joining")
        bench = _Bench(folder, passages)
        rows += [{"tokenizer": Path(folder).name, **bench.row(join)} for join in JOINS]
    import tokenizers as library
    import transformers

    versions = {"tokenizers": library.__version__, "transformers": transformers.__version__, "hf_blend": __version__}
    return {"versions": versions, "goal": GOAL, "rows": rows}


class _Bench:
    """A store with all passages of one tokenizer, and a model that is as small as can be."""

    def __init__(self, folder: str, passages: Sequence[Sequence[str]]) -> None:
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(Path(folder).expanduser()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no tokenizer in {folder}: {str(error).splitlines()[0]} Give its folder.") from error
        sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 1, "max_position_embeddings": 1 << 16}
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(self._tokenizer), **sizes)
        self._model, self._passages = LlamaForCausalLM(config).eval(), passages
        self._store = ChunkStore.open("memory://")
        self._own = {
            text: key
            for texts in passages
            for text, key in zip(texts, self._store.add(self._model, self._tokenizer, texts), strict=True)
        }

    def row(self, join: str) -> dict[str, Any]:
        """What is reused where passages are joined in one way."""
        found: dict[str, list[float]] = {"by_ids": [], "by_text": [], "whole": []}
        lost, stored, same = [], 0, True
        for texts in self._passages:
            prompt = f"Answer the question.\n\n{JOINS[join](texts)}\n\nQuestion: who was it?"
            plain = self._tokenizer(prompt)["input_ids"]
            cache = BlendCache(self._model, self._store)
            same &= cache.inputs_from_text(self._tokenizer, prompt, texts)["input_ids"][0].tolist() == plain
            ids = np.array(plain)
            reused = {"by_ids": self._reused(self._plan(plain)), "by_text": self._reused(self._named(prompt, texts))}
            for text in texts:
                key = self._own[text]
                tokens = len(key.token_ids)
                stored += tokens
                for way, by_key in reused.items():
                    found[way].append(by_key.get(key, 0) / tokens)
                found["whole"].append(float(_is_in(ids, key.token_ids)))
                lost.append(tokens - reused["by_ids"].get(key, 0))
        lengths = [len(self._own[text].token_ids) for texts in self._passages for text in texts]
        shares = {way: float(np.average(values, weights=lengths)) for way, values in found.items()}
        return {
            "join": join,
            "passages": len(lengths),
            "tokens": stored,
            "ids_as_plain_call": bool(same),
            "reused_by_ids": shares["by_ids"],
            "reused_by_text": shares["by_text"],
            "least_of_a_passage": min(found["by_ids"]),
            "passages_below_goal": sum(share < GOAL for share in found["by_ids"]),
            "longest_passage_below_goal": max(
                (tokens for tokens, share in zip(lengths, found["by_ids"], strict=True) if share < GOAL), default=0
            ),
            "most_tokens_lost": max(lost),
            "found_whole": sum(found["whole"]) / len(lengths),
        }

    def _plan(self, ids: list[int], known: Any = None) -> Plan:
        prefix = self._store.default_prefix(self._model, self._tokenizer)
        planner = Planner(self._model, self._store, fingerprint(self._model), ChunkOrigin(prefix))
        return planner.plan([PromptRow(tuple(ids), len(ids), 0, spans=known, prefix=0)], len(ids))

    def _named(self, prompt: str, texts: Sequence[str]) -> Plan:
        made = build_text(self._tokenizer, prompt, texts, special=True)
        return self._plan(list(made.ids), made.spans())

    @staticmethod
    def _reused(plan: Plan) -> dict[Any, int]:
        """Tokens of each chunk that have their place in a plan; a passage that is there twice counts once."""
        return {placed.chunk.key: placed.tokens for placed in plan.chunks}


def _is_in(ids: np.ndarray, chunk: Sequence[int]) -> bool:
    """Whether all ids of a chunk are in a prompt, one behind the other; looked up without the store."""
    starts = np.flatnonzero(ids[: len(ids) - len(chunk) + 1] == chunk[0])
    return any(np.array_equal(ids[start : start + len(chunk)], chunk) for start in starts)
