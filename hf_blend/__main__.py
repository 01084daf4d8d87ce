# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m hf_blend` is `hf-blend`."""

from hf_blend.cli.main import main

if __name__ == "__main__":
    main()
