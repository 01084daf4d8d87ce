# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Faults injected by the thousand into what requests use: `python -m benchmarks.faults --help`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # tiny models; pytest finds them there, too
