# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A page that shows full prefill, full reuse and blending side by side; what `hf-blend demo` starts.

Only `page` knows Gradio. The rest is plain Python that tests call without a browser.
"""
