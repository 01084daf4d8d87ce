# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""From what people write to token ids and the spans of chunks in them. The door is `pieces`."""
