# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to tell from a block's representation how much a query will look at it: one file each."""
