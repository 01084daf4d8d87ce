# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The comparisons of papers, made with a model and data of one's own: `python benchmarks/reproduce.py`."""
