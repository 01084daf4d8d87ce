# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Two small worlds, each with a model that knows nothing else: instruments of the tests, whose answers can be wrong.

`reference` has short stories and binds in its first layers; `chains` has long ones, in which a question follows a
chain over chunks, and needs the middle layers. What holds for them need not hold for any other model.
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REFERENCE, CHAINS = (str(HERE / "models" / name) for name in ("reference", "chains"))
REFERENCE_TASK, CHAIN_TASK = (str(HERE / "tasks" / f"{name}.py") for name in ("reference_world", "chain_world"))


def reference_questions() -> list[dict[str, Any]]:
    """Return questions that full prefill of the reference model answers right and full reuse mostly wrong."""
    return _read(HERE / "questions.json")


def chain_questions() -> list[dict[str, Any]]:
    """Return questions to the chain model: prefix, chunks, question and answer of each."""
    return _read(Path(CHAINS) / "questions.json")


def _read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return found
