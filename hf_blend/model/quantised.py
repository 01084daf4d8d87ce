# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""8-bit models of bitsandbytes say at every matrix product that they cast its input; a request silences that."""

import logging
import weakref

from torch import nn

LOGGER = "bitsandbytes.autograd._functions"
REPEATED = "MatMul8bitLt: inputs will be cast"


class _WithoutCasts(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(REPEATED)


def silence_casts(model: nn.Module, owner: object) -> None:
    """Drop the line that bitsandbytes logs per product, as long as an object lives; other lines pass.

    Args:
        model: nothing is done if it has no 8-bit layer.
        owner: such as the cache of a request.
    """
    if any(type(module).__name__ == "Linear8bitLt" for module in model.modules()):
        logger, dropping = logging.getLogger(LOGGER), _WithoutCasts()
        logger.addFilter(dropping)
        weakref.finalize(owner, logger.removeFilter, dropping).atexit = False
