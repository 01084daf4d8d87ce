# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is trained by gradients through a model, which stays as it is: corrections; a room that may be absent."""
