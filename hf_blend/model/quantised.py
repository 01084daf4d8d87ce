# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""8-bit models of bitsandbytes say at every matrix product that they cast its input; a request silences that."""

import logging
import weakref

from torch import nn

from .fingerprint import PerStructure

LOGGER = "bitsandbytes.autograd._functions"
REPEATED = "MatMul8bitLt: inputs will be cast"


class _WithoutCasts(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(REPEATED)


@PerStructure
def _has_casts(model: nn.Module) -> bool:
    return any(type(module).__name__ == "Linear8bitLt" for module in model.modules())


def silence_casts(model: nn.Module, owner: object, digest: str = "") -> None:
    """Drop the line that bitsandbytes logs per product, as long as an object lives; other lines pass.

    Args:
        model: nothing is done if it has no 8-bit layer.
        owner: such as the cache of a request.
        digest: the model's `structure_digest`, where it was asked for just now.
    """
    if _has_casts(model, digest):
        logger, dropping = logging.getLogger(LOGGER), _WithoutCasts()
        logger.addFilter(dropping)
        weakref.finalize(owner, logger.removeFilter, dropping).atexit = False
