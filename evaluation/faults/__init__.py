# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Faults injected into stores by the thousand: `python -m hf_blend.evaluation.faults --help`."""
