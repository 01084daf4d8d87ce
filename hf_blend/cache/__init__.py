# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`BlendCache`, the `transformers.Cache` of one request, and the layers that hold its K and V.

`blend_cache.BlendCache` is the public class. To transformers it is a dynamic cache: empty before the prefill, full
after it.
"""
