# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Faults injected by the thousand into what requests use: `python -m tests.faults --help`."""
