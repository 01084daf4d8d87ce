# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Run a measurement of benchmarks/benches and print its result file.

python benchmarks/bench.py decode --tokens 32 > benchmarks/results/decode.json

An option is a field of the measurement's plan; several values follow each other.
"""

import argparse
import importlib
import json
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHES = Path(__file__).resolve().parent / "benches"
NAMES = sorted(path.stem.replace("_", "-") for path in BENCHES.glob("*.py") if path.stem != "__init__")


def load(name: str) -> tuple[type, Any]:
    """Return the plan and the function of a measurement."""
    module = importlib.import_module(f"benches.{name.replace('-', '_')}")
    measure = getattr(module, f"measure_{name.replace('-', '_')}")
    return typing.get_type_hints(measure)["plan"], measure


def parser_of(plan: type) -> argparse.ArgumentParser:
    """Make a parser with an option for each field that is a number, a word, or several of one of them."""
    parser = argparse.ArgumentParser(prog="bench.py", argument_default=argparse.SUPPRESS)
    for name, kind in typing.get_type_hints(plan).items():
        kinds = [one for one in (kind, *typing.get_args(kind)) if one in (int, float, str)]
        if kinds:
            nargs = "+" if typing.get_origin(kind) is tuple else None
            parser.add_argument(f"--{name.replace('_', '-')}", type=kinds[0], nargs=nargs)
    return parser


def run(words: Sequence[str]) -> dict[str, Any]:
    """Measure as the words say."""
    name = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    name.add_argument("bench", choices=NAMES)
    plan, measure = load(name.parse_args(words[:1]).bench)
    given = vars(parser_of(plan).parse_args(words[1:]))
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    found: dict[str, Any] = measure(plan(**settings), lambda said: print(said, file=sys.stderr))
    return found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:]), indent=1))
