# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Train the second reference model on one CPU thread: `python benchmarks/reference_model/train.py --folder run`.

A checkpoint is written every few minutes, and the same command goes on from it. `--seed` gives another start and
another order of the data; `--minutes` ends after so long.

Two things of training the finished model has not. Late reading: below layer `READS` questions see BOS and themselves
only, so that the chains must be followed where they are told, by the chunks' own tokens; half of the later steps are
trained with the plain causal mask, with which the finished model runs. Helpers: linear heads behind the layers below
`READS` tell, at the token that closes a clause, what it leans on (layer 0) and who the owner is (layer n, for up to n
links). Attention is taught as well: the closing word of a link should look at what it leans on, and the question at
the end of the fact that it asks for.
"""

import argparse
import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import torch
from batches import ASKED, Batch, draw, reuse_mask
from muon import Muon
from net import HEAD_DIM, LAYERS, LOOKERS, READS, WIDTH, Net, rotary, start_reading
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm
from worlds.chains.story import Level
from worlds.chains.tokens import EOS, vocabulary
from worlds.chains.words import OWNERS, THINGS

logger = logging.getLogger(__name__)
SAVED_EVERY = 120.0  # seconds
SCORED_TOKENS = 8192
_LOOK_WEIGHT = 0.5  # of attention to where the chain goes on
_NOISE = 0.1  # of the weights' standard deviation, when heads are untied
_END_WEIGHT = 0.1  # of the end-of-text token behind the answer


@dataclass(frozen=True)
class Stage:
    """Part of the curriculum.

    Attributes:
        name: in log and checkpoint.
        level: of the stories.
        story: tokens of a story, padded.
        questions: per story, at most.
        rows: per step.
        steps: at most.
        rate: learning rate at the start.
        last_rate: at the end.
        goal: ends early when this share of held-out questions is right under the stock mask; above 1 never does.
        stock: share of the steps under the stock mask, in which questions see the story from layer 0 on.
        untied: every query head has keys and values of its own from here on.
    """

    name: str
    level: Level
    story: int
    questions: int
    rows: int
    steps: int
    rate: float = 3e-3
    last_rate: float = 3e-3
    goal: float = 1.01
    stock: float = 0.5
    untied: bool = False


SHORT = Level(chunks=(3, 6), facts=(1, 3), fillers=(0, 1))
MIDDLE = Level(chunks=(6, 10), facts=(1, 3), fillers=(2, 4))
LONG = Level(chunks=(8, 14), facts=(1, 2), fillers=(5, 9))
STAGES = (
    Stage("one link", replace(SHORT, depth=1), 96, 10, 8, 40, 2e-3, 2e-3, stock=0.0),
    Stage("four links", SHORT, 96, 10, 8, 160, 2e-3, 2e-3),
    Stage("middle", MIDDLE, 256, 16, 6, 141, 2e-3, 1.7e-3),
    Stage("long", LONG, 640, 20, 4, 150, 2e-3, 1e-3),
    Stage("longest", replace(Level(), fillers=(8, 16)), 1152, 20, 3, 300, 1.5e-3, 1e-4),
    Stage("whole", Level(), 1792, 24, 2, 120, 1.2e-3, 5e-5),
    Stage("settle", Level(), 1792, 24, 2, 150, 8e-4, 2e-5, stock=0.7),
    Stage("apart", Level(), 1792, 24, 2, 330, 1.2e-3, 1e-5, stock=0.7, untied=True),
)


class Trainer:
    """Model, helpers, optimizers and the place in the plan."""

    def __init__(self, folder: Path, seed: int, minutes: float, compiled: bool) -> None:
        """Start from the folder's checkpoint, or from seeded random weights."""
        self.folder, self.seed, self.minutes, self.compiled = folder, seed, minutes, compiled
        torch.manual_seed(seed)
        ids = vocabulary()
        self.net = Net(len(ids))
        self.helpers = nn.ModuleList(nn.Linear(WIDTH, len(ids), bias=False) for _ in range(READS))
        members = [[ids[word] for word in words] for words in THINGS.values()]
        start_reading(self.net, self.helpers, members, [ids[kind] for kind in THINGS], [ids[one] for one in OWNERS])
        self.untied = False
        self.optimizers = make_optimizers(self.net, self.helpers)
        self.stage, self.step, self.tokens, self.seconds = 0, 0, 0, 0.0
        if self.checkpoint.exists():
            self.load()
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            for layer in self.net.model.layers:
                layer.compile(dynamic=False)

    @property
    def checkpoint(self) -> Path:
        """The file to go on from."""
        return self.folder / "checkpoint.pt"

    def parts(self) -> dict:
        """What has a state."""
        return {"net": self.net, "helpers": self.helpers, "muon": self.optimizers[0], "adamw": self.optimizers[1]}

    def save(self) -> None:
        """Write everything in one go."""
        place = {name: getattr(self, name) for name in ("stage", "step", "tokens", "seconds", "untied")}
        state = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({**state, "place": place, "seed": self.seed}, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)

    def load(self) -> None:
        """Go back to the checkpoint."""
        state = torch.load(self.checkpoint, weights_only=True)
        if state["place"].pop("untied", False):
            self.untie()
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        vars(self).update(state["place"])

    def run(self) -> None:
        """Train what is left of the plan."""
        while self.stage < len(STAGES) and self.seconds < self.minutes * 60:
            stage = STAGES[self.stage]
            if stage.untied and not self.untied:
                self.untie()
            self.run_stage(stage)
            if self.seconds < self.minutes * 60:
                self.stage, self.step = self.stage + 1, 0
            self.save()

    def untie(self) -> None:
        """Give every query head its own keys and values; the optimizers start afresh with them."""
        for layer in self.net.model.layers:
            layer.self_attn.untie(_NOISE)
        self.optimizers = make_optimizers(self.net, self.helpers)
        self.untied = True

    def run_stage(self, stage: Stage) -> None:
        """Train one stage to its goal, its last step or the end of the time."""
        random = Random(f"{self.seed}-{stage.name}-{self.step}")
        reported, losses = time.monotonic(), []
        while self.step < stage.steps and self.seconds < self.minutes * 60:
            started = time.monotonic()
            losses.append(self.train_step(stage, random))
            self.step += 1
            self.tokens += stage.rows * (stage.story + stage.questions * ASKED)
            self.seconds += time.monotonic() - started
            if time.monotonic() - reported > SAVED_EVERY or self.step == stage.steps:
                reached = self.report(stage, losses)
                self.save()
                reported, losses = time.monotonic(), []
                if reached >= stage.goal:
                    return

    def train_step(self, stage: Stage, random: Random) -> list[float]:
        """One step; returns the losses of answers and helpers."""
        batch = draw(random, stage.level, stage.rows, stage.story, stage.questions)
        masks = [batch.late] * LAYERS if random.random() < stage.stock else late_reading(batch)
        states = self.net(batch.ids, batch.positions, batch.story, masks)
        row, place, owner, _ = batch.asked.T
        answers = cross_entropy(self.net.logits(states[-1][row, place]), owner)
        ends = cross_entropy(self.net.logits(states[-1][row, place + 1]), torch.full_like(owner, vocabulary()[EOS]))
        helped = torch.stack(self.helper_losses(batch, states)).mean()
        looked = torch.stack(self.looking_losses(batch, states)).mean()
        (answers + _END_WEIGHT * ends + helped + _LOOK_WEIGHT * looked).backward()
        nn.utils.clip_grad_norm_([*self.net.parameters(), *self.helpers.parameters()], 1.0)
        total = self.step / stage.steps
        rate = stage.rate + (stage.last_rate - stage.rate) * total
        rate *= min(1.0, (self.step + 1) / 30)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return [answers.item(), helped.item(), looked.item()]

    def helper_losses(self, batch: Batch, states: list[Tensor]) -> list[Tensor]:
        """Cross-entropy of each helper."""
        row, place, owner, leant, depth, *_ = batch.links.T
        found = []
        for index, helper in enumerate(self.helpers):
            logits = helper(rms_norm(states[index][row, place], (WIDTH,)))
            near = depth <= index
            found.append(cross_entropy(logits, leant) if index == 0 else cross_entropy(logits[near], owner[near]))
        return found

    def looking_losses(self, batch: Batch, states: list[Tensor]) -> list[Tensor]:
        """For each layer, minus the logarithm of the attention, mean over the heads, to where the chain goes on.

        In layer 0 that is the thing that a link names by its kind, in the layers below `READS` the end of its fact,
        and behind them, for the question mark, the end of the fact that is asked for.
        """
        row, place, _, _, _, named, closed = batch.links[batch.links[:, 4] > 0].T
        asking, mark, _, told = batch.asked.T
        tables, found = rotary(batch.positions), []
        inputs = [self.net.model.embed_tokens(batch.ids), *states]
        for index, layer in enumerate(self.net.model.layers):
            q, k, _ = layer.self_attn.heads(layer.input_layernorm(inputs[index]), *tables)
            rows, at, goal = (asking, mark, told) if index >= READS else (row, place, closed if index else named)
            k = k[:, LOOKERS if index == 0 else slice(None), : batch.story]
            q = q[:, LOOKERS if index == 0 else slice(None)]
            scores = torch.einsum("nhd,nhtd->nht", q[rows, :, at], k[rows]) * HEAD_DIM**-0.5
            hidden = (torch.arange(batch.story) > at[:, None]) | (batch.chunks[rows] < 0)
            weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1).mean(1)
            found.append(-weights.gather(1, goal[:, None]).clamp_min(1e-6).log().mean())
        return found

    @torch.compiler.set_stance("force_eager")  # other shapes must not use up the limit of recompiles
    @torch.no_grad()
    def report(self, stage: Stage, losses: list[list[float]]) -> float:
        """Log losses and held-out scores; returns the share right under the stock mask."""
        rows = max(8, SCORED_TOKENS // stage.story)
        batch = draw(Random("scored"), stage.level, rows, stage.story, stage.questions, "heldout")
        late, stock = late_reading(batch), [batch.late] * LAYERS
        right = {
            name: self.right(batch, *masks)
            for name, masks in {
                "late": (late, None),
                "stock": (stock, None),
                "reuse": (stock, reuse_mask(batch)),
            }.items()
        }
        depths = torch.tensor([fact.depth for fact in batch.facts])
        shown = {
            name: " ".join(
                [f"{ok.mean():.3f}", *(f"{ok[depths == d].mean():.2f}" for d in range(stage.level.depth + 1))]
            )
            for name, ok in right.items()
        }
        means = [sum(column) / len(column) for column in zip(*losses, strict=True)]
        logger.info(
            "%s %d/%d, %.2f M tokens, %.1f min, loss %.3f %.3f %.3f | late %s | stock %s | reuse %s | helpers %s",
            stage.name, self.step, stage.steps, self.tokens / 1e6, self.seconds / 60, *means,
            shown["late"], shown["stock"], shown["reuse"], self.helped(batch),
        )  # fmt: skip
        return right["stock"].mean().item()

    def right(self, batch: Batch, masks: list[Tensor], story_mask: Tensor | None) -> Tensor:
        """1.0 where a question is answered rightly."""
        states = self.net(batch.ids, batch.positions, batch.story, masks, story_mask)
        row, place, owner, _ = batch.asked.T
        return (self.net.logits(states[-1][row, place]).argmax(-1) == owner).float()

    def helped(self, batch: Batch) -> str:
        """Share of the links that each helper tells rightly."""
        states = self.net(batch.ids, batch.positions, batch.story, late_reading(batch))
        row, place, owner, leant, depth, *_ = batch.links.T
        found = []
        for index, helper in enumerate(self.helpers):
            told = helper(rms_norm(states[index][row, place], (WIDTH,))).argmax(-1)
            counted = (depth >= 1) & ((depth <= index) | (index == 0))
            found.append(f"{(told == (owner if index else leant))[counted].float().mean():.2f}")
        return " ".join(found)


def late_reading(batch: Batch) -> list[Tensor]:
    """The masks of training, one per layer."""
    return [batch.early] * READS + [batch.late] * (LAYERS - READS)


def make_optimizers(net: Net, helpers: nn.ModuleList) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest.

    Embeddings learn slowly: at the rate of the rest they move farther in a hundred steps than they are long, and what
    layer 0 starts by telling apart is lost.
    """
    inner = [weight for name, weight in net.named_parameters() if weight.ndim == 2 and "embed" not in name]
    outer = [weight for name, weight in net.named_parameters() if weight.ndim == 1 or "embed" in name]
    muon = Muon(inner, lr=0.0, momentum=0.95, weight_decay=0.01)
    muon.param_groups[0]["share"] = 1.0
    groups = [{"params": outer, "share": 0.1}, {"params": list(helpers.parameters()), "share": 0.5}]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return muon, adamw


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoint.pt and train.log go")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and of the data's order")
    parser.add_argument(
        "--minutes", type=float, default=240, help="end after so long, all runs in the folder together"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile (compiling needs a C++ compiler)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=options.folder / "train.log", level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    trainer = Trainer(options.folder, options.seed, options.minutes, not options.eager)
    logger.info("plan: %s", [asdict(stage) for stage in STAGES])
    trainer.run()


if __name__ == "__main__":
    main()
