# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V beyond the device.

`memory` places the layers of one cache, `states` stores the K and V that are elsewhere, and `layer`
is the cache layer over both.
"""
