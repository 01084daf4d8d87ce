# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A small world, and a model that knows nothing else: an instrument of the tests, whose answers can be wrong.

Its stories are short, and it binds in its first layers. What holds for it need not hold for any other model.
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REFERENCE = str(HERE / "models" / "reference")


def reference_questions() -> list[dict[str, Any]]:
    """Return questions that full prefill of the reference model answers right and full reuse mostly wrong."""
    found: list[dict[str, Any]] = json.loads((HERE / "questions.json").read_text("utf-8"))
    return found
