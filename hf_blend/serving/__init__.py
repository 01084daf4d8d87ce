# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A thin OpenAI endpoint: one model, one worker thread, a queue. For many users there is vLLM with our connector."""
