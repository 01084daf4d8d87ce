# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a model computes, as far as it can be known without running it.

The door is `hf_blend.model.fingerprint`. `config` reads the config, `weights` digests and samples tensors, `canonical`
refuses hooks and wrappers that nothing can compare.
"""
