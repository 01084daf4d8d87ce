# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What holding, reading and seeing less of a context changes on a real model and real text.

    python benchmarks/real_context.py decoding --data hotpotqa.jsonl --output benchmarks/results/real_decoding.json
    python benchmarks/real_context.py window --data longbench_mini_hotpotqa.jsonl … --output …/real_window.json

`decoding` takes prompts as `real_selectors.py` makes them. Full prefill answers greedily; each way then reads those
tokens one by one. The divergence is KL(p, q) in nats, p from the same request with all of K and V: full prefill where
blocks are selected in decoding, the blend by the default settings where K and V are held in few bits or stored blocks
are loaded in part. `window` reads the beginnings of long passages in pieces, and counts the loss of each token
behind the window. A line per prompt or passage is kept in the output; what is there is not measured again.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from real_selectors import Bench, Task, is_fitting, read_prompts
from torch import Tensor
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore, ShiftCache, self_extend, sparse_decoding
from hf_blend.evaluation.summary import interval
from hf_blend.version import __version__

BITS = {"kv_bits 8": 8, "kv_bits 4": 4}
BLOCKS = {  # way → settings of sparse decoding
    "gsa 0.5": {"share": 0.5},
    "gsa 0.25": {"share": 0.25},
    "kvstar 0.25": {"share": 0.25, "method": "kvstar"},
    "random 0.25": {"share": 0.25, "method": str(Path(__file__).parent / "rules" / "random_blocks.py")},
}
LOADED = {"partial 0.5": 0.5, "partial 0.25": 0.25}
BLOCK_TOKENS = 16
WINDOW = 128
READ = 384
PIECE = 64
PROMPTS = Task(tokens=(700, 1045))
Line = dict[str, Any]


def forced(bench: Bench, cache: Any, first: Tensor, answer: Tensor) -> Tensor:
    """Read an answer token by token: log probabilities of each of its tokens, `[tokens, words]`."""
    rows = [first, *(bench.model(token[None, None], past_key_values=cache).logits[:, -1] for token in answer[:-1])]
    return torch.log_softmax(torch.cat(rows).float(), -1)


def compared(way: str, full: Tensor, whole: Tensor, found: Tensor, answer: Tensor, share: float) -> Line:
    """Distances of a way's distributions from those with all of K and V, and from full prefill's."""
    kl, kl_full = ((one.exp() * (one - found)).sum(-1) for one in (whole, full))
    line = {"way": way, "kl": float(kl.mean()), "kl_behind_first": float(kl[1:].mean())}
    same = int((found.argmax(-1) == answer).sum())
    return {**line, "kl_full": float(kl_full.mean()), "same": same, "of": len(answer), "share": share}


def decoding(bench: Bench, row: Line) -> Iterator[Line]:
    """Measure all ways on one prompt."""
    empty = ChunkStore.open("memory://")
    ids = bench.inputs(BlendCache(bench.model, empty), row)["input_ids"]
    dense = BlendCache(bench.model, empty)
    first = bench.model(ids, past_key_values=dense, use_cache=True, logits_to_keep=1).logits[:, -1]
    answer, full = bench.continued(dense, first, 10)
    for way, settings in BLOCKS.items():
        dense.crop(ids.shape[1] - dense.get_seq_length())
        sparse = {"block_tokens": BLOCK_TOKENS, "recent_blocks": 1, "min_tokens": 0, **settings}
        with sparse_decoding(bench.model, dense, **sparse) as session:
            counts = counted(session)
            found = forced(bench, dense, first, answer)
        yield compared(way, full, full, found, answer, counts["looked"] / counts["all"])
    with tempfile.TemporaryDirectory() as folder:
        yield from blended(bench, row, (answer, full), folder)


def counted(session: Any) -> dict[str, int]:
    """Count the keys that steps look at, and those that there are."""
    counts = {"looked": 0, "all": 0}
    select = session.select_kv

    def select_kv(index: int, query: Tensor, key: Tensor, *given: Any) -> Any:
        found = select(index, query, key, *given)
        counts["all"] += key.shape[2]
        counts["looked"] += (found[0] if found else key).shape[2]
        return found

    vars(session)["select_kv"] = select_kv  # before the method of the class
    return counts


def blended(bench: Bench, row: Line, dense: tuple[Tensor, Tensor], folder: str) -> Iterator[Line]:
    """Measure the ways that begin with a blend by the default settings."""
    answer, full = dense

    def asked(store: ChunkStore, **settings: Any) -> tuple[Tensor, BlendCache]:
        cache = BlendCache(bench.model, store, **settings)
        first = bench.model(**bench.inputs(cache, row), past_key_values=cache, logits_to_keep=1).logits[:, -1]
        return forced(bench, cache, first, answer), cache

    with ChunkStore.open(folder, partial=LOADED["partial 0.5"], durability="none") as store:
        asked(store, recompute_ratio=0.0)  # fill it
    with ChunkStore.open(folder) as store:
        whole, cache = asked(store)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        yield compared("blend", full, whole, whole, answer, 1.0)
        for way, bits in BITS.items():
            found, cache = asked(store, kv_bits=bits)
            yield compared(way, full, whole, found, answer, sum(layer.nbytes for layer in cache.layers) / held)
    for way, share in LOADED.items():
        with ChunkStore.open(folder, partial=share) as store:
            found, cache = asked(store)
            loaded = cache.report.partial
        yield compared(way, full, whole, found, answer, loaded["loaded_bytes"] / loaded["all_bytes"])


def losses(read: Callable[[Tensor], Tensor], ids: Tensor) -> float:
    """Read a text in pieces: the mean loss of the tokens behind the window, in nats."""
    found = torch.cat([read(piece).log_softmax(-1) for piece in ids.split(PIECE)])
    lost = -found[:-1].gather(1, ids[1:, None])[:, 0]
    return float(lost[WINDOW - 1 :].mean())


def reader(bench: Bench, cache: Any) -> Callable[[Tensor], Tensor]:
    """What reads a piece behind those before it: logits `[tokens, words]`."""
    return lambda piece: bench.model(piece[None], past_key_values=cache, use_cache=True).logits[0].float()


def cut_reader(bench: Bench) -> Callable[[Tensor], Tensor]:
    """Reads a piece behind what fits a window; where it is full, its newer half is prefilled again."""
    kept = torch.zeros(0, dtype=torch.long)
    held = [DynamicCache()]

    def read(piece: Tensor) -> Tensor:
        nonlocal kept
        if len(kept) + len(piece) > WINDOW:
            kept = kept[len(kept) // 2 :]
            held[0] = DynamicCache()
            bench.model(kept[None], past_key_values=held[0], use_cache=True, logits_to_keep=1)
        kept = torch.cat((kept, piece))
        return reader(bench, held[0])(piece)

    return read


def window(bench: Bench, row: Line) -> Iterator[Line]:
    """Measure the loss of one passage behind the window in all ways."""
    ids = torch.tensor(bench.tokenizer(row["text"]).input_ids[:READ])
    caches = {
        "everything is seen": DynamicCache,
        "ShiftCache": lambda: ShiftCache(bench.model, window_tokens=WINDOW),
    }
    for way, made in caches.items():
        cache = made()
        yield {"way": way, "loss": losses(reader(bench, cache), ids)}
    yield {"way": "the newer half prefilled again", "loss": losses(cut_reader(bench), ids)}
    with self_extend(bench.model, trained_tokens=WINDOW, max_tokens=READ):
        yield {"way": "Self-Extend", "loss": losses(reader(bench, DynamicCache()), ids)}


def prompts(bench: Bench, paths: list[Path]) -> Iterator[Line]:
    """Prompts as `real_selectors.py` makes them, the shorter ones."""
    return (row for row in read_prompts(paths[0]) if is_fitting(bench, row))


def passages(bench: Bench, paths: list[Path]) -> Iterator[Line]:
    """Passages that are long enough, in an order that a seed gives."""
    found = {
        text: f"{row['id']}/{number}"
        for path in paths
        for row in map(json.loads, path.read_text("utf-8").splitlines())
        for number, text in enumerate(row["chunks"])
    }
    pairs = random.Random(7).sample(list(found.items()), len(found))
    return ({"id": name, "text": text} for text, name in pairs if len(bench.tokenizer(text).input_ids) >= READ)


def of_decoding(lines: list[Line]) -> list[Line]:
    """Means over the prompts, with intervals."""
    rows = []
    for way in dict.fromkeys(line["way"] for line in lines):
        own = [line for line in lines if line["way"] == way]
        made: Line = {"way": way, "n": len(own), "share": statistics.fmean(line["share"] for line in own)}
        for name in ("kl", "kl_behind_first", "kl_full"):
            values = [line[name] for line in own]
            made |= {name: statistics.fmean(values), f"{name}_interval": interval(values)}
        rows.append(made | {"same": sum(line["same"] for line in own) / sum(line["of"] for line in own)})
    return rows


def of_window(lines: list[Line]) -> list[Line]:
    """Perplexities, and how much higher than where everything is seen, with intervals over the passages."""
    found = {
        way: {line["id"]: line["loss"] for line in lines if line["way"] == way} for way in (li["way"] for li in lines)
    }
    stock = found["everything is seen"]
    rows = []
    for way, own in found.items():
        gaps = [loss - stock[name] for name, loss in own.items()]
        low, high = interval(gaps)
        made = {"way": way, "n": len(own), "perplexity": math.exp(statistics.fmean(own.values()))}
        made |= {"times": math.exp(statistics.fmean(gaps)), "times_low": math.exp(low), "times_high": math.exp(high)}
        rows.append(made)
    return rows


MEASURES = {"decoding": (prompts, decoding, of_decoding), "window": (passages, window, of_window)}
SETTINGS = {
    "decoding": {
        "answer_tokens": 10,
        "passages_tokens": PROMPTS.tokens,
        "block_tokens": BLOCK_TOKENS,
        "blend": "the default settings",
    },
    "window": {"window_tokens": WINDOW, "read_tokens": READ, "piece_tokens": PIECE, "seed": 7},
}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    rows_of, measure, summary = MEASURES[given.measure]
    bench = Bench(given.model, {}, task=PROMPTS)
    lines: list[Line] = json.loads(given.output.read_text("utf-8"))["each"] if given.output.exists() else []
    done = {line["id"] for line in lines}
    for row in itertools.islice(rows_of(bench, given.data), given.count):
        if row["id"] in done:
            continue
        lines += [{"id": row["id"], **line} for line in measure(bench, row)]
        settings = {"model": bench.name, "data": [path.name for path in given.data], **SETTINGS[given.measure]}
        settings |= {"dtype": "float32", "threads": 1, "hf_blend": __version__}
        settings |= {"torch": torch.__version__, "transformers": transformers.__version__}
        document = {"settings": settings, "rows": summary(lines), "each": lines}
        given.output.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        print(len(lines), row["id"], flush=True)


if __name__ == "__main__":
    main()
