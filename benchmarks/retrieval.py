# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How often the right file is first, or among the first five: found by words, by meaning, and by both.

    python benchmarks/retrieval.py --meaning ENCODER --output benchmarks/results/retrieval.json

Files and questions are fixed in retrieval_questions.json: 180 files of a Debian system's documentation and of the
descriptions of installed packages, and 40 questions, half of them in other words than the file's. A file is as good as
its best piece. Without an encoder, words alone are measured.
"""

import argparse
import hashlib
import json
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_blend import ChunkStore
from hf_blend.errors import ConfigError, HfBlendError
from hf_blend.evaluation.bundled import open_model
from hf_blend.evaluation.documents import Document, read_file
from hf_blend.evaluation.meaning import Encoder, Meaning
from hf_blend.evaluation.retrieving import Piece, Retriever, Splitter

QUESTIONS = Path(__file__).with_name("retrieval_questions.json")
DOCUMENTATION = Path("/usr/share/doc")
DEPTH = 5


def documents_of(name: str) -> list[Document]:
    """A file of this machine, as it is indexed."""
    root, _, below = name.partition("/")
    try:
        if root == "doc":
            return read_file(DOCUMENTATION / below, name)
        return [Document(name, metadata.distribution(below).read_text("METADATA") or "")]
    except (HfBlendError, OSError, metadata.PackageNotFoundError) as error:
        raise ConfigError(
            f"{name} is not on this machine: {error}. Files are those of Debian 12, and of the extra dev installed."
        ) from error


def files_of(pieces: Sequence[Piece]) -> list[str]:
    """The files of ranked pieces, each once."""
    return list(dict.fromkeys(piece.name for piece in pieces))


def measure(names: list[str], questions: list[dict[str, str]], encoder: str, store: str) -> dict[str, Any]:
    """Ask all questions in each way."""
    splitter = Splitter(open_model("smollm2", device="cpu").tokenizer)
    pieces = splitter.split_all(document for name in names for document in documents_of(name))
    words, top_k = Retriever(pieces, len(pieces) - 1), len(pieces) - 1
    ways: dict[str, Callable[[str], list[Piece]]] = {"words": lambda question: ranked_by_words(words, question)}
    result: dict[str, Any] = {"files": len(names), "pieces": len(pieces)}
    if encoder:
        with ChunkStore.open(store) as opened:
            meaning = Meaning(Encoder(encoder, "cpu"), pieces, opened)
            result["parts"] = sum(map(len, meaning.vectors.values()))
        both = Retriever(pieces, top_k, meaning)
        ways["meaning"] = lambda question: [pieces[number] for number in meaning.rank(question)]
        ways["both"] = both.rank
    rows = []
    for question in questions:
        orders = {way: files_of(rank(question["question"])) for way, rank in ways.items()}
        ranks = {
            way: order.index(question["file"]) + 1 if question["file"] in order else None
            for way, order in orders.items()
        }
        rows.append({**question, "rank": ranks})
    digest = hashlib.sha256("".join(piece.text for piece in pieces).encode("utf-8", "surrogatepass")).hexdigest()
    return {**result, "text_sha256": digest, "recall": recall(rows, list(ways)), "questions": rows}


def ranked_by_words(retriever: Retriever, question: str) -> list[Piece]:
    """The pieces that share a word with a question."""
    return [retriever.pieces[number] for number in retriever.rank_by_words(question, len(retriever.pieces))]


def recall(rows: list[dict[str, Any]], ways: list[str]) -> dict[str, Any]:
    """Share of the questions whose file is first, and among the first five, by way and by words of the question."""
    table: dict[str, Any] = {}
    for kind in ("all", *dict.fromkeys(row["words"] for row in rows)):
        own = [row for row in rows if kind in ("all", row["words"])]
        table[kind] = {"n": len(own)}
        for way in ways:
            ranks = [row["rank"][way] or len(own) + DEPTH for row in own]
            table[kind][way] = {f"at_{most}": sum(rank <= most for rank in ranks) / len(own) for most in (1, DEPTH)}
    return table


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the result down."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--meaning", default="", help="folder of a sentence encoder, or its id in the hub's cache")
    parser.add_argument("--encoder-name", default="", help="how the result calls it")
    parser.add_argument("--store", default="memory://", help="where vectors are kept for another run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    fixed = json.loads(QUESTIONS.read_text("utf-8"))
    measured = measure(fixed["files"], fixed["questions"], options.meaning, options.store)
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=QUESTIONS.parent, capture_output=True, text=True)
    result = {"encoder": options.encoder_name or options.meaning, "commit": done.stdout.strip(), **measured}
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(json.dumps(result["recall"], indent=1))
    if options.output:
        options.output.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
