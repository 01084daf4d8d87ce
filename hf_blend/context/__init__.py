# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Long contexts: sequences that share, move and drop tokens, windows that shift, extension, and saved sessions."""
