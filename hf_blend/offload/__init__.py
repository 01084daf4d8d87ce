# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""KV beyond the device: accelerate decides how many layers' K and V are kept where.

`placement` asks accelerate's memory maths, `states` holds what is elsewhere and brings a layer's K and V, `memory`
joins the two for one cache and counts bytes. The files are written here, append-only, and verified whenever read.
"""
