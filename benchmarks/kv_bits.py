# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What decoding from K and V in 8 or 4 bits changes: answers and logits of the reference model, bytes, time per step.

    python benchmarks/kv_bits.py --count 200 --output benchmarks/results/kv_bits.json

Prefix and chunks go through a blended prefill; then the question is brought token by token, so that it reads the
chunks from what is held, and the answer is decoded greedily. The same is done with `kv_bits` and without.
Logits are compared along the question, where both have read the same tokens.

The part `sequences` does so behind a `SequenceCache`: as it was read, and with the first chunk removed and what
followed it shifted up. `--parts sequences` computes that alone and leaves the rest of the file.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer
from worlds import REFERENCE
from worlds.world.sampling import Example, sample_examples

from hf_blend import BlendCache, ChunkStore, SequenceCache
from hf_blend.cache.layers import BlendLayer
from hf_blend.cache.quantised_layer import QuantisedLayer
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.summary import interval
from hf_blend.prompt.pieces import build
from hf_blend.version import __version__

MAX_NEW_TOKENS = 8
PARTS = ("reference", "step", "sequences")
STEP = {"batch": 1, "kv_heads": 8, "head_dim": 128}  # one layer of Llama-3.1-8B


@torch.no_grad()
def ask(model: Any, tokenizer: Any, store: ChunkStore, example: Example, kv_bits: int | None) -> dict[str, Any]:
    """Bring a question token by token behind a blended context, and decode.

    Args:
        model: the reference model.
        tokenizer: its tokenizer.
        store: keeps the chunks.
        example: the question.
        kv_bits: of the cache.

    Returns:
        `logits` of each question token, the answer's `text`, and how many of the `held` tokens are `packed`.
    """
    prompt = build(tokenizer, example.prefix, example.chunks, example.question)
    ids = torch.tensor([prompt.ids])
    context = ids.shape[1] - len(prompt.question)
    cache = BlendCache(model, store, kv_bits=kv_bits)
    cache.inputs(tokenizer, prefix=example.prefix, chunks=example.chunks, question=example.question)
    model(ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
    steps = [model(ids[:, [place]], past_key_values=cache).logits[0, -1] for place in range(context, ids.shape[1])]
    packed = sum(getattr(layer, "packed_tokens", 0) for layer in cache.layers) / len(cache.layers)
    answer = [int(steps[-1].argmax())]
    while len(answer) < MAX_NEW_TOKENS and answer[-1] != model.generation_config.eos_token_id:
        answer.append(int(model(torch.tensor([answer[-1:]]), past_key_values=cache).logits[0, -1].argmax()))
    text = tokenizer.decode(answer, skip_special_tokens=True).strip()
    return {"logits": torch.stack(steps), "text": text, "packed": packed, "held": context}


def quality(count: int, seed: int, kv_bits: int) -> dict[str, Any]:
    """Compare answers and logits.

    Args:
        count: questions.
        seed: of the questions.
        kv_bits: 8 or 4.

    Returns:
        The figures.
    """
    model, tokenizer = load_model(REFERENCE)
    store, found = ChunkStore.open("memory://"), []
    for example in sample_examples(count, seed):
        plain, packed = (ask(model, tokenizer, store, example, bits) for bits in (None, kv_bits))
        change = (packed["logits"] - plain["logits"]).abs()
        found.append(
            {
                "equal": packed["text"] == plain["text"],
                "plain": plain["text"].strip(" .").lower() == example.answer.lower(),
                "packed": packed["text"].strip(" .").lower() == example.answer.lower(),
                "share": packed["packed"] / packed["held"],
                "largest": float(change.max()),
                "mean": float(change.mean()),
                "spread": float(plain["logits"].std()),
            }
        )
    mean = {name: statistics.fmean(float(one[name]) for one in found) for name in found[0]}
    gaps = [float(one["packed"]) - float(one["plain"]) for one in found]
    return {
        "questions": count,
        "equal_answers": mean["equal"],
        "equal_answers_interval": interval([float(one["equal"]) for one in found]),
        "exact_match": {"full precision": mean["plain"], f"{kv_bits} bits": mean["packed"]},
        "exact_match_difference_interval": interval(gaps),
        f"share_of_context_in_{kv_bits}_bits": mean["share"],
        "logit_error_mean": mean["mean"],
        "logit_error_largest": max(one["largest"] for one in found),
        "logit_spread": mean["spread"],
    }


@torch.no_grad()
def read_on(model: Any, prompt: Any, kv_bits: int | None, is_moved: bool) -> tuple[torch.Tensor, float]:
    """Bring a question token by token behind a context in a `SequenceCache`.

    Args:
        model: the reference model.
        prompt: context and question.
        kv_bits: of the cache.
        is_moved: the first chunk is removed, and what follows it is shifted up, before the question comes.

    Returns:
        Logits of each question token, `[tokens, vocabulary]`, and the share of cells in few bits at the end.
    """
    ids, cache = torch.tensor([prompt.ids]), SequenceCache(model, kv_bits=kv_bits)
    context = ids.shape[1] - len(prompt.question)
    with cache:
        model(ids[:, :context], past_key_values=cache, logits_to_keep=1)
        if is_moved:
            start = len(prompt.prefix)
            stop = start + len(prompt.chunks[0])
            cache.remove(0, start, stop)
            cache.shift(0, stop, None, start - stop)
        steps = [model(ids[:, [place]], past_key_values=cache).logits[0, -1] for place in range(context, ids.shape[1])]
    state = cache.state()
    return torch.stack(steps), state["layer.0.groups"].numel() / state["ids"].numel() if kv_bits else 0.0


def sequences(count: int, seed: int, kv_bits: int, is_moved: bool) -> dict[str, Any]:
    """Compare logits behind a `SequenceCache` with those of one in full precision, to which the same was done."""
    model, tokenizer = load_model(REFERENCE)
    found = []
    for example in sample_examples(count, seed):
        prompt = build(tokenizer, example.prefix, example.chunks, example.question)
        (plain, _), (packed, share) = (read_on(model, prompt, bits, is_moved) for bits in (None, kv_bits))
        apart, p, q = (packed - plain).abs(), plain.log_softmax(-1), packed.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        found.append(
            {
                "equal_first_tokens": float(plain[-1].argmax() == packed[-1].argmax()),
                "share_of_cells_in_few_bits": share,
                "logit_error_mean": float(apart.mean()),
                "logit_error_largest": float(apart.max()),
                "kl_mean_nats": float(kl.mean()),
                "kl_largest_nats": float(kl.max()),
                "logit_spread": float(plain.std()),
            }
        )
    return {
        "questions": count,
        **{name: (max if "largest" in name else statistics.fmean)(one[name] for one in found) for name in found[0]},
        "kl_mean_nats_interval": interval([one["kl_mean_nats"] for one in found]),
    }


def steps(tokens: int, rounds: int) -> dict[str, Any]:
    """Bytes held and time of one decoding step's update in one layer, bfloat16, the kinds of layers in turn.

    Args:
        tokens: held before the step.
        rounds: steps of each kind; the median counts.

    Returns:
        By kind of layer.
    """
    shape = (STEP["batch"], STEP["kv_heads"], tokens, STEP["head_dim"])
    layers = {
        "DynamicLayer": DynamicLayer(),
        "BlendLayer": BlendLayer(),
        "QuantisedLayer": QuantisedLayer(),
        "QuantisedLayer, 4 bits": QuantisedLayer(4),
    }
    whole = tuple(torch.randn(shape).bfloat16() for _ in range(2))
    new = tuple(states[:, :, :1].clone() for states in whole)
    times: dict[str, list[float]] = {name: [] for name in layers}
    for layer in layers.values():
        layer.update(*whole)
    for _ in range(rounds):
        for name, layer in layers.items():
            started = time.perf_counter()
            layer.update(*new)
            times[name].append(1e3 * (time.perf_counter() - started))
    plain = sum(states.nbytes for states in (layers["DynamicLayer"].keys, layers["DynamicLayer"].values))
    held = {name: getattr(layer, "nbytes", plain) for name, layer in layers.items()}
    return {
        name: {"update_ms": statistics.median(times[name]), "bytes_per_token": held[name] / (tokens + rounds)}
        for name in layers
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is computed; the rest stays")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=4096, help="held by the layer whose update is timed")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path, default=Path("kv_bits.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {}
    result["machine"] = {
        "device": platform.processor() or "cpu",
        "threads": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_blend": __version__,
    }
    if "reference" in given.parts:
        result |= {
            f"reference{end}": quality(given.count, given.seed, bits) for end, bits in (("", 8), (", 4 bits", 4))
        }
    if "step" in given.parts:
        layers = steps(given.tokens, given.rounds)
        result["step"] = {"tokens": given.tokens, **STEP, "dtype": "bfloat16", "layers": layers}
    if "sequences" in given.parts:
        result["sequences"] = {
            f"{bits} bits, {how}": sequences(given.count, given.seed, bits, how == "moved")
            for bits in (8, 4)
            for how in ("as read", "moved")
        }
    given.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
