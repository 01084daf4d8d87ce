# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Many requests at once: blended prefills inside transformers' continuous batching, and an HTTP server around it.

Promises: the engine's own steps are stock; a blended prefill never holds them up for longer than a bound; blended
blocks are never taken for an exact prefix; what cannot be served so is refused by name.
"""
