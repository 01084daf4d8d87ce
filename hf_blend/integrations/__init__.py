# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Classes for RAG frameworks, a file for each: its chat model with the KV of retrieved documents reused.

A framework is imported by its own file alone, such as `from hf_blend.integrations.langchain import ChatBlend`.
"""
