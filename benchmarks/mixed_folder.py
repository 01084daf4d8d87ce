# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A folder of 157 files as a machine has them: how many are read, why the others are not, and what retrieval finds.

python benchmarks/mixed_folder.py --output benchmarks/results/mixed_folder.json

Files come from the documentation of a Debian system and from the installed packages, an ending after the other, so
that no ending is most of the folder. Eight of them answer a question each, of which seven should come first.
"""

import argparse
import json
import random
import re
import shutil
import sysconfig
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from hf_blend.evaluation.bundled import open_model
from hf_blend.evaluation.documents import Corpus
from hf_blend.evaluation.retrieving import Retriever, Splitter

ROOTS = {"doc": Path("/usr/share/doc"), "packages": Path(sysconfig.get_path("purelib"))}
FILES, SEED = 157, 7
QUESTIONS = {  # a file → a question that it answers
    "doc/libffi8/html/Thread-Safety.html": "Is libffi thread-safe?",
    "doc/base-passwd/users-and-groups.html": "Which group can read log files in /var/log for system monitoring?",
    "doc/bash/COMPAT.gz": "Which shopt option took the place of the variable glob_dot_filenames?",
    "doc/procps/bugs.md": "To which email list are bug reports about procps sent?",
    "packages/gradio/media_assets/data/titanic.csv": "How old was Mr. Owen Harris Braund, and did he survive?",
    "packages/jsonschema_specifications/schemas/draft7/metaschema.json": "What simpleTypes has JSON schema draft-07?",
    "packages/tenacity/wait.py": "What is the default multiplier of exponential backoff in wait_exponential?",
    "packages/numpy/ma/README.rst": "Who wrote the new maskedarray, and why are masked arrays a subclass of ndarray?",
}
ACCEPTED = re.compile(
    r"it is (\S+/\S+, )?not text|hidden|in __pycache__|in node_modules|it holds no text|its pages hold no text.*"
)


def fill(folder: Path, count: int, seed: int) -> None:
    """Copy files, those that answer questions among them."""
    chance, by_ending = random.Random(seed), defaultdict[str, list[str]](list)
    for root, path in ROOTS.items():
        for file in sorted(path.rglob("*")):
            if file.is_file() and not file.is_symlink():
                by_ending[file.suffix].append(f"{root}/{file.relative_to(path)}")
    for files in by_ending.values():
        chance.shuffle(files)
    names = list(QUESTIONS)
    while len(names) < count:
        for ending in chance.sample(sorted(by_ending), len(by_ending)):
            if by_ending[ending] and len(names) < count and (name := by_ending[ending].pop()) not in names:
                names.append(name)
    for name in names:
        root, _, below = name.partition("/")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOTS[root] / below, folder / name)


def measure(count: int, seed: int) -> dict[str, Any]:
    """Read the folder, and ask the questions."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "mixed")
        fill(folder, count, seed)
        started, corpus = time.perf_counter(), Corpus([str(folder)])
        documents = list(corpus)
        read_s = time.perf_counter() - started
        pieces = Splitter(open_model(device="cpu").tokenizer).split_all(documents)
    retriever, answers = Retriever(pieces), list[dict[str, Any]]()
    for file, question in QUESTIONS.items():
        names = list(dict.fromkeys(piece.name for piece in retriever.rank(question)))
        name = f"mixed/{file}"
        answers.append({"question": question, "file": file, "rank": names.index(name) + 1 if name in names else None})
    files = {str(document.path) for document in documents}
    unacceptable = [[name, reason] for name, reason in corpus.left_out if not ACCEPTED.fullmatch(reason)]
    return {
        "files": count, "seed": seed, "read": len(files), "left_out": len(corpus.left_out),
        "good": len(files) + len(corpus.left_out) - len(unacceptable), "unacceptable": unacceptable,
        "reasons": dict(sorted(corpus.left_out)), "read_s": round(read_s, 1), "pieces": len(pieces),
        "first": sum(answer["rank"] == 1 for answer in answers), "questions": answers,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the result down."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    result = json.dumps(measure(options.files, options.seed), indent=1, ensure_ascii=False)
    print(result)
    if options.output:
        options.output.write_text(result + "\n", "utf-8")


if __name__ == "__main__":
    main()
