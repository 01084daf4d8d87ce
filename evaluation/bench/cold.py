# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Making files cold: the kernel is told to forget what it read of them."""

import os
from pathlib import Path


def forget(folder: Path) -> None:
    """Tell the kernel to drop the pages of every entry below a folder."""
    for path in folder.rglob("*.safetensors"):
        forget_file(path)


def forget_file(path: Path) -> None:
    """Tell the kernel to drop a file's pages; those that were not written yet are written first."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
