# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A second process that works out gradients beside the trainer, without either waiting for the other.

On a shared machine two threads of one process run at the pace of the busier core; two processes do not.
Gradients may be a step or two old when they are used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
import torch.multiprocessing as multiprocessing
from transformers import LlamaForCausalLM

Gradients = Callable[[LlamaForCausalLM, Random], float]


def wait_while(file: Path | None) -> None:
    """Sleep as long as a file exists."""
    while file is not None and file.exists():
        time.sleep(2)


class Helper:
    """Adds gradients of its own batches to a shared buffer, from which the trainer takes them."""

    def __init__(self, model: LlamaForCausalLM, work: Gradients, seed: str, pause_file: Path | None) -> None:
        """Start the process.

        Args:
            model: in shared memory; the helper reads whatever weights it holds at the time.
            work: draws a batch and leaves its gradients in the weights' `.grad`; must be picklable.
            seed: of the batches.
            pause_file: sleep while this exists.
        """
        context = multiprocessing.get_context("spawn")
        self.lock = context.Lock()
        self.buffers = [torch.zeros_like(weight).share_memory_() for weight in model.parameters()]
        self.count = torch.zeros(1, dtype=torch.long).share_memory_()
        arguments = (model, work, seed, pause_file, self.lock, self.buffers, self.count)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()

    def take(self, model: LlamaForCausalLM) -> int:
        """Average the waiting gradients into the model's own and return how many batches stand behind them now."""
        with self.lock:
            total = 1 + int(self.count)
            for weight, buffer in zip(model.parameters(), self.buffers, strict=True):
                weight.grad.add_(buffer).div_(total)
                buffer.zero_()
            self.count.zero_()
        return total

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.join()


def _work(
    model: LlamaForCausalLM,
    work: Gradients,
    seed: str,
    pause_file: Path | None,
    lock: multiprocessing.Lock,
    buffers: list[torch.Tensor],
    count: torch.Tensor,
) -> None:
    torch.set_num_threads(1)
    random = Random(seed)
    trainer = os.getppid()
    while os.getppid() == trainer:
        wait_while(pause_file)
        model.zero_grad(set_to_none=True)
        work(model, random)
        with lock:
            for weight, buffer in zip(model.parameters(), buffers, strict=True):
                buffer.add_(weight.grad)
            count.add_(1)
