# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""KV beyond the device: accelerate decides how many layers' K and V are kept where.

`memory` asks accelerate's memory maths and counts bytes for one cache, `states` holds what is elsewhere and brings a
layer's K and V. The files are written here, append-only, and verified whenever read.
"""
