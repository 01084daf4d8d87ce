# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Train the reference model on a CPU: `python benchmarks/reference_model/world_train.py --folder run`.

A checkpoint is written every few minutes; `--resume` goes on from it. `--stage NAME` ends after that stage.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from muon import Muon
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM
from world_batches import Batch, attention_mask, collate, story_row
from world_helpers import Helper, wait_while
from world_model import build_model
from world_scoring import heldout_scores
from world_stages import STAGES, Stage

logger = logging.getLogger(__name__)
SEED = 20261120


@dataclass
class Progress:
    """Where training stands; saved with the weights."""

    stage: str = ""
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """One model, its optimizers and its place in the plan."""

    def __init__(self, folder: Path, compiled: bool, helped: bool, pause_file: Path | None) -> None:
        """Start anew.

        Args:
            folder: where checkpoints go.
            compiled: use torch.compile.
            helped: let a second process work out gradients too.
            pause_file: training sleeps while this exists.
        """
        self.folder, self.compiled, self.helped, self.pause_file = folder, compiled, helped, pause_file
        self.model = build_model()
        self.progress = Progress()
        self.restored: dict = {}

    @property
    def checkpoint(self) -> Path:
        """The file that `--resume` reads."""
        return self.folder / "checkpoint.pt"

    def save(self, optimizers: list[torch.optim.Optimizer], name: str | None = None) -> None:
        """Write weights, optimizer state and progress in one go."""
        state = {
            "weights": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "progress": asdict(self.progress),
        }
        target = self.folder / name if name else self.checkpoint
        torch.save(state, target.with_suffix(".tmp"))
        target.with_suffix(".tmp").replace(target)

    def load(self) -> None:
        """Go back to the last checkpoint."""
        self.model, self.progress, self.restored = read_checkpoint(self.checkpoint)

    def run(self, stage: Stage) -> None:
        """Train one stage from its start, or from where the checkpoint stands in it."""
        resumed = self.progress.stage == stage.name and bool(self.restored)
        if not resumed:
            self.progress.stage, self.progress.step = stage.name, 0
        optimizers = make_optimizers(self.model, stage.weight_decay)
        if resumed:
            for optimizer, state in zip(optimizers, self.restored["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        self.restored = {}
        seed = f"{SEED}-{stage.name}-{self.progress.step}"
        work = Work(stage, self.compiled)
        self.model.share_memory()
        helper = Helper(self.model, work, f"{seed}-helper", self.pause_file) if self.helped else None
        try:
            self._loop(stage, work, Random(seed), optimizers, helper)
        finally:
            if helper is not None:
                helper.stop()
        self.save(optimizers)
        self.save([], f"after-{stage.name}.pt")

    def _loop(self, stage: Stage, work: Work, random: Random, optimizers: list, helper: Helper | None) -> None:
        reported = time.monotonic()
        losses: list[float] = []
        while self.progress.step < stage.steps:
            wait_while(self.pause_file)
            losses.append(self._step(stage, work, random, optimizers, helper))
            if time.monotonic() - reported > 90 or self.progress.step >= stage.steps:
                self._report(stage, losses)
                self.save(optimizers)
                losses, reported = [], time.monotonic()

    def _step(self, stage: Stage, work: Work, random: Random, optimizers: list, helper: Helper | None) -> float:
        started = time.monotonic()
        loss = work(self.model, random)
        batches = helper.take(self.model) if helper is not None else 1
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = stage.rate(self.progress.step) * group["share"]
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.progress.step += batches
        self.progress.tokens += batches * stage.rows * stage.length
        self.progress.seconds += time.monotonic() - started
        return loss

    def _report(self, stage: Stage, losses: list[float]) -> None:
        place = self.progress
        scores = heldout_scores(self.model, stage.level, stage.length, 24)
        shown = {
            way: " ".join(f"{kind} {share:.2f}" for kind, share in kinds.items()) for way, kinds in scores.items()
        }
        logger.info(
            "%s %d/%d, %.2f M tokens, %.1f min, rate %.1e, loss %.3f | full: %s | reuse: %s",
            stage.name,
            place.step,
            stage.steps,
            place.tokens / 1e6,
            place.seconds / 60,
            stage.rate(place.step),
            sum(losses) / max(1, len(losses)),
            shown["full"],
            shown["reuse"],
        )


def read_checkpoint(file: Path) -> tuple[LlamaForCausalLM, Progress, dict]:
    """Return the model, how far it was trained, and all that the file holds."""
    state = torch.load(file, weights_only=True)
    model = build_model()
    model.load_state_dict(state["weights"])
    return model, Progress(**state["progress"]), state


def make_optimizers(model: LlamaForCausalLM, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    inner = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    known = {id(weight) for weight in inner}
    outer = [weight for weight in model.parameters() if id(weight) not in known]
    optimizers = [
        Muon(inner, lr=0.0, momentum=0.95, weight_decay=weight_decay),
        torch.optim.AdamW(outer, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    for optimizer, share in zip(optimizers, (1.0, 0.5), strict=True):
        optimizer.param_groups[0]["share"] = share
    return optimizers


def make_batch(stage: Stage, random: Random) -> Batch:
    """Draw the rows of one step."""
    levels = [stage.easy if random.random() < stage.easy_share else stage.level for _ in range(stage.rows)]
    rows = [story_row(random, level, stage.length, heldout=False) for level in levels]
    return collate(rows, stage.length)


class Work:
    """Draws one batch of a stage and leaves its gradients in the model; can be sent to another process."""

    def __init__(self, stage: Stage, compiled: bool) -> None:
        """Remember the stage and whether to use torch.compile."""
        self.stage, self.compiled = stage, compiled
        self.forward: Callable | None = None

    def __call__(self, model: LlamaForCausalLM, random: Random) -> float:
        """Return the loss: the weighted mean of the cross-entropy over all predictions that count."""
        if self.forward is None:
            self.forward = torch.compile(model.model, dynamic=False) if self.compiled else model.model
        batch = make_batch(self.stage, random)
        output = self.forward(
            inputs_embeds=model.model.embed_tokens(batch.ids),
            attention_mask=attention_mask(batch),
            position_ids=batch.positions,
            use_cache=False,
        )
        counted = batch.weights > 0
        logits = model.lm_head(output.last_hidden_state[counted])
        weights = batch.weights[counted]
        loss = (cross_entropy(logits, batch.labels[counted], reduction="none") * weights).sum() / weights.sum()
        loss.backward()
        return loss.item()


def main() -> None:
    """Read the command line and train the stages that are left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints and train.log go")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    parser.add_argument("--stage", help="end after this stage")
    parser.add_argument("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    parser.add_argument("--helper", action="store_true", help="work out gradients in a second process too")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--pause-file", type=Path, help="sleep while this file exists")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=options.folder / "train.log", level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    trainer = Trainer(options.folder, options.compile, options.helper, options.pause_file)
    if options.resume:
        trainer.load()
    names = [stage.name for stage in STAGES]
    start = names.index(trainer.progress.stage) if options.resume else 0
    for stage in STAGES[start:]:
        trainer.run(stage)
        if stage.name == options.stage:
            break


if __name__ == "__main__":
    main()
