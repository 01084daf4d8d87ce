# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is known of a stock model: its layers, its attention, how its keys move, and which model it is.

All of it is found by looking and by probing, none by the model's name. A model is left as it was, also when an
exception ends the call.
"""
