# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Train a target that writes, and a small draft for it: `python benchmarks/reference_model/draft.py --folder run`.

Asked whose a thing is, both answer with the sentences of the story that lead to its owner, in turn: up to 35 tokens,
each sentence in another place of the prompt. Both have two layers. The draft is no copy: it is narrower, half the
parameters and half the training, from a start and an order of the data of its own; it never sees the target.

`run/target` and `run/draft` are folders of models, for

    hf-blend reproduce kvstar --model run/target --draft run/draft --task chain-links

A checkpoint is written every minute, and the same command resumes from it.
"""

import argparse
import json
import logging
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from batches import chosen, fitting
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from world_model import start_reading
from world_train import make_optimizers

from hf_blend.evaluation.chains.story import Level, chain, question
from hf_blend.evaluation.chains.tokens import BOS, EOS, build_tokenizer, vocabulary
from hf_blend.evaluation.tasks.chain_links import ChainLinks

logger = logging.getLogger(__name__)
REPORTED_EVERY, SAVED_EVERY = 60.0, 60.0  # seconds
WARM_STEPS, SCORED_TOKENS = 20, 4096
MARK = 4  # index of a question's last token
NO_LABEL = -100
SHORT = Level(chunks=(3, 6), facts=(1, 3), fillers=(0, 1))
MIDDLE = Level(chunks=(6, 10), facts=(1, 3), fillers=(2, 4))
LONG = Level(chunks=(8, 14), facts=(1, 2), fillers=(5, 9))


@dataclass(frozen=True)
class Stage:
    """Part of the curriculum: `steps` steps of `rows` rows, each of `story` tokens and `asked` for the questions."""

    level: Level
    story: int
    asked: int
    rows: int
    steps: int


@dataclass(frozen=True)
class Plan:
    """How one of the two models is trained.

    Attributes:
        width: of the model.
        seed: of the weights and of the order of the data.
        rate: learning rate at the start of a cycle; it falls to nothing by a cosine over the cycle's stages.
        cycles: in turn.
    """

    width: int
    seed: int
    rate: float
    cycles: tuple[tuple[Stage, ...], ...]

    def at(self, step: int) -> tuple[Stage, float]:
        """The stage of a step, and how much of its cycle is done by then."""
        for cycle in self.cycles:
            left, steps = step, sum(stage.steps for stage in cycle)
            for stage in cycle:
                if left < stage.steps:
                    return stage, step / steps
                left -= stage.steps
            step -= steps
        return self.cycles[-1][-1], 1.0


@dataclass(frozen=True)
class Batch:
    """Rows as tensors, `[rows, tokens]`.

    Attributes:
        ids: a story, then questions with their answers.
        positions: of the prompt in which each question would be alone.
        owners: 0 for the story, 1, 2, … for the questions, -1 for padding.
        labels: what a token must predict.
    """

    ids: Tensor
    positions: Tensor
    owners: Tensor
    labels: Tensor

    @property
    def mask(self) -> Tensor:
        """Who sees whom, `[rows, 1, tokens, tokens]`: the story is seen by all, a question by itself."""
        query, key = self.owners[:, :, None], self.owners[:, None]
        return ((key == 0) | (key == query)).tril()[:, None]


def build(width: int) -> LlamaForCausalLM:
    """A stock Llama of two layers that starts out by looking for the like."""
    ids = vocabulary()
    config = LlamaConfig(
        vocab_size=len(ids), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=4096,
        bos_token_id=ids[BOS], eos_token_id=ids[EOS], pad_token_id=ids[EOS],
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    start_reading(model)
    return model


PLANS = {
    "target": Plan(
        96, 2, 4e-3,
        (
            (Stage(SHORT, 96, 224, 8, 500), Stage(MIDDLE, 256, 256, 6, 300), Stage(LONG, 640, 256, 3, 200)),
            (Stage(MIDDLE, 256, 256, 6, 180), Stage(LONG, 640, 256, 3, 90)),
            (Stage(MIDDLE, 256, 256, 6, 170),),
        ),
    ),
    "draft": Plan(
        64, 1, 4e-3,
        ((Stage(SHORT, 96, 224, 8, 350), Stage(MIDDLE, 256, 256, 6, 150), Stage(LONG, 640, 256, 3, 80)),),
    ),
}  # fmt: skip


def draw(random: Random, stage: Stage, split: str = "train") -> Batch:
    """Draw the rows of one step; questions as many as fit."""
    known = vocabulary()
    size = (stage.rows, stage.story + stage.asked)
    ids, positions = torch.full(size, known[EOS]), torch.zeros(size, dtype=torch.long)
    owners, labels = torch.full(size, -1), torch.full(size, NO_LABEL)
    for row in range(stage.rows):
        told = fitting(random, stage.level, stage.story, split)
        words = [BOS, *(word for chunk in told.chunks for word in chunk)]
        length, first = len(words), stage.story
        ids[row, :length] = torch.tensor([known[word] for word in words])
        positions[row, :length], owners[row, :length] = torch.arange(length), 0
        for number, fact in enumerate(chosen(random, told, stage.asked, split), start=1):
            text = torch.tensor([known[word] for word in (*question(fact.thing), *chain(told, fact), EOS)])
            place = slice(first, first + len(text))
            if place.stop > size[1]:
                break
            ids[row, place], owners[row, place] = text, number
            positions[row, place] = torch.arange(length, length + len(text))
            labels[row, first + MARK : place.stop - 1] = text[MARK + 1 :]
            first = place.stop
    return Batch(ids, positions, owners, labels)


def predicted(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits `[labels, words]` where something must be predicted, and what that is."""
    states = model.model(batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False)
    counted = batch.labels != NO_LABEL
    return model.lm_head(states.last_hidden_state[counted]), batch.labels[counted]


@torch.no_grad()
def scored(model: LlamaForCausalLM, stage: Stage) -> tuple[float, float]:
    """Share of the tokens, and of the whole answers, that are right on held-out facts."""
    batch = draw(Random("scored"), replace(stage, rows=SCORED_TOKENS // stage.story), "heldout")
    logits, labels = predicted(model, batch)
    right = logits.argmax(-1) == labels
    numbers = (batch.owners + stage.asked * torch.arange(len(batch.ids))[:, None])[batch.labels != NO_LABEL]
    answers = [bool(right[numbers == one].all()) for one in numbers.unique()]
    return right.float().mean().item(), sum(answers) / len(answers)


class Trainer:
    """One of the two models, its optimizers and its place in the plan."""

    def __init__(self, name: str, folder: Path) -> None:
        """Start from the folder's checkpoint, or from the plan's beginning."""
        self.name, self.plan, self.checkpoint = name, PLANS[name], folder / f"{name}.pt"
        torch.manual_seed(self.plan.seed)
        self.model = build(self.plan.width)
        self.optimizers = make_optimizers(self.model, weight_decay=0.02)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if self.checkpoint.exists():
            self.load()

    def save(self) -> None:
        """Write everything in one go."""
        place = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        parts = {"net": self.model.state_dict(), "optimizers": [one.state_dict() for one in self.optimizers]}
        torch.save({**parts, "place": place}, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)

    def load(self) -> None:
        """Go back to the checkpoint."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["net"])
        for optimizer, known in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(known)
        vars(self).update(state["place"])

    def run(self) -> None:
        """Train what is left of the plan."""
        steps = sum(stage.steps for cycle in self.plan.cycles for stage in cycle)
        random, losses = Random(f"{self.plan.seed}-{self.step}"), []
        reported = saved = time.monotonic()
        while self.step < steps:
            started, (stage, done) = time.monotonic(), self.plan.at(self.step)
            losses.append(self.train_step(draw(random, stage), done))
            self.step, self.tokens = self.step + 1, self.tokens + stage.rows * (stage.story + stage.asked)
            self.seconds += time.monotonic() - started
            if time.monotonic() - reported > REPORTED_EVERY or self.step == steps:
                tokens, answers = scored(self.model, stage)
                logger.info(
                    "%s %d/%d, story %d, %.2f M tokens, %.1f min, loss %.3f | held out: tokens %.3f answers %.3f",
                    self.name, self.step, steps, stage.story, self.tokens / 1e6, self.seconds / 60,
                    sum(losses) / len(losses), tokens, answers,
                )  # fmt: skip
                reported, losses = time.monotonic(), []
            if time.monotonic() - saved > SAVED_EVERY or self.step == steps:
                self.save()
                saved = time.monotonic()

    def train_step(self, batch: Batch, done: float) -> float:
        """One step, with so much of the cycle done; returns the loss over the answers' tokens."""
        loss = cross_entropy(*predicted(self.model, batch))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = self.plan.rate * min(1.0, (self.step + 1) / WARM_STEPS) * (1 + math.cos(math.pi * done)) / 2
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.item()

    def export(self, folder: Path) -> None:
        """Write the model with its tokenizer and the record of its training."""
        ids = vocabulary()
        special = {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[EOS]}
        self.model.generation_config = GenerationConfig(
            **special, do_sample=False, max_new_tokens=ChainLinks.max_new_tokens
        )
        self.model.eval().save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        tokens, answers = scored(self.model, self.plan.at(self.step)[0])
        record: dict[str, Any] = {
            "seed": self.plan.seed,
            "rate": self.plan.rate,
            "cycles": [[asdict(stage) for stage in cycle] for cycle in self.plan.cycles],
            "tokens": self.tokens,
            "minutes": round(self.seconds / 60, 1),
            "parameters": self.model.num_parameters(),
            "heldout": {"tokens_right": tokens, "answers_right": answers},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    """Read the command line, train and write both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints, train.log and the models go")
    parser.add_argument("--only", choices=list(PLANS), help="train one of the two")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=options.folder / "train.log", level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    for name in [options.only] if options.only else PLANS:
        trainer = Trainer(name, options.folder)
        trainer.run()
        trainer.export(options.folder / name)


if __name__ == "__main__":
    main()
