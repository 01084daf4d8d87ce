# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Deciding what is worth loading: how fast this machine loads and computes, and what to recompute meanwhile.

The door is `controller.LoadingController`, set as `store.controller`.
"""
