# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A conversation: every turn's KV is kept, old turns are shifted out, and can be blended back in.

    chat = Conversation(model, tokenizer, system="You answer briefly.", archive=ChunkStore.open("memory://"))
    print(chat.ask("Who wrote it?", max_new_tokens=64))
    chat.save("chat.session")
    chat.recall(0)                      # the first turn was shifted out: bring it back

A question that fails is forgotten: the conversation is as before, unless its window had to be shifted already.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..cache.blend_cache import BlendCache
from ..errors import ConfigError, PromptError, UnsupportedModelError
from ..model.anatomy import has_windows, refuse_extended
from ..model.modality import placeholder_ids
from ..model.placement import input_device
from ..prompt.tokenizer import front_ids
from ..store import ChunkStore
from .context_shift import ShiftCache
from .reuse import chunk_of
from .session import load_session, save_session


@dataclass(frozen=True)
class Turn:
    """A question and its answer: texts, and all of its token ids, marks of the chat template included."""

    question: str
    answer: str
    token_ids: tuple[int, ...]


class Conversation:
    """One conversation with one model. The window bounds its cache; the archive, if there is one, keeps all turns."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        system: str | None = None,
        window_tokens: int | None = None,
        archive: ChunkStore | None = None,
        kv_bits: int | None = None,
        allow_unverified: bool = False,
    ) -> None:
        """Begin."""
        self.model, self.tokenizer, self.archive = model, tokenizer, archive
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._begin = self._encode(self._text(False), first=True)
        keep_tokens = max(1, len(self._begin))
        self.cache = ShiftCache(
            model,
            window_tokens=window_tokens,
            keep_tokens=keep_tokens,
            kv_bits=kv_bits,
            allow_unverified=allow_unverified,
        )
        self._waiting: list[int] = self._begin  # ids that are part of the conversation and not in the cache yet
        self.turns: list[Turn] = []

    def ask(self, question: str, **options: Any) -> str:
        """Ask, and keep question and answer."""
        if not question:
            raise PromptError("the question is empty, expected some text. Ask something.")
        if self.archive is not None:
            refuse_extended(self.model)
        before = self._text(False)
        self._messages.append({"role": "user", "content": question})
        asked = self._encode(self._text(True)[len(before) :], first=not before and not self._waiting)
        ids = [*self.cache.tokens(), *self._waiting, *asked]
        held, shifts = self.cache.get_seq_length(), self.cache.shifts
        try:
            output = self._generate(ids, options)
        except BaseException:
            self._messages.pop()
            if self.cache.shifts == shifts:
                self.cache.crop(held - self.cache.get_seq_length())
            raise
        answer_ids = output[len(ids) :]
        answer = str(self.tokenizer.decode(answer_ids, skip_special_tokens=True)).strip()
        self._messages.append({"role": "assistant", "content": answer})
        self._waiting = answer_ids[-1:]
        self._remember(Turn(question, answer, (*asked, *answer_ids)))
        return answer

    def recall(self, turn: int, **settings: Any) -> BlendCache:
        """Bring a turn that was shifted out back into the cache, behind the system prompt.

        Its stored KV is moved into place, and a share of it and of what stands behind it is recomputed.
        """
        if has_windows(self.model):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} attends within windows in some layers, whose KV a blended prefill does "
                "not keep whole, so a turn cannot be put back. Ask again with the turn's text."
            )
        if self.archive is None or not 0 <= turn < len(self.turns):
            raise ConfigError(
                f"turn {turn} of {len(self.turns)} cannot be recalled: an archive and a turn from 0 on are wanted."
            )
        kept = self.cache.tokens()
        keep, recalled = self.cache.keep_tokens, self.turns[turn].token_ids[:-1]
        room = self.cache.window_tokens - keep - len(recalled) - 1
        rest = kept[max(keep, len(kept) - max(0, room)) :]
        if room < 0:
            raise ConfigError(f"turn {turn} has {len(recalled)} tokens, which do not fit the window. Enlarge it.")
        self._keep_chunk(0, keep)
        if len(rest) > 1:
            self._keep_chunk(len(kept) - len(rest), len(kept))
        ids = [*kept[:keep], *recalled, *rest]
        blend = BlendCache(self.model, self.archive, **{**settings, "chunk_prefix_ids": ()})
        with torch.no_grad():
            self.model.generate(torch.tensor([ids], device=self._device), past_key_values=blend, max_new_tokens=1)
        self._adopt(blend, ids)
        return blend

    def save(self, path: str | Path) -> int:
        """Write the cache to a file; gives its size in bytes. Texts and archive are not part of it."""
        self._flush()
        return save_session(self.cache, path, self.tokenizer)

    def load(self, path: str | Path) -> None:
        """Go on from a saved cache; a file that does not fit leaves the conversation as it was."""
        load_session(self.cache, path, self.tokenizer)
        self._waiting = []

    @property
    def _device(self) -> torch.device:
        return input_device(self.model)

    def _generate(self, ids: list[int], options: dict[str, Any]) -> list[int]:
        parts = {"prefill_chunk_size": max(1, (self.cache.window_tokens - self.cache.keep_tokens) // 2)}
        fits = len(ids) - self.cache.get_seq_length() <= parts["prefill_chunk_size"]
        prompt = torch.tensor([ids], device=self._device)
        output = self.model.generate(prompt, past_key_values=self.cache, **({} if fits else parts), **options)
        found: list[int] = output[0].tolist()
        return found

    def _flush(self) -> None:
        """Bring into the cache what is not there yet: the last token of the last answer."""
        if self._waiting:
            with torch.no_grad(), self.cache:
                self.model(torch.tensor([self._waiting], device=self._device), past_key_values=self.cache)
            self._waiting = []

    def _remember(self, turn: Turn) -> None:
        self.turns.append(turn)
        held = self.cache.get_seq_length()
        if self.archive is not None and held - len(turn.token_ids) + 1 >= self.cache.keep_tokens:
            self._keep_chunk(held - len(turn.token_ids) + 1, held)  # its last token is not in the cache yet

    def _keep_chunk(self, start: int, stop: int) -> None:
        self.cache.compact()
        is_text = placeholder_ids(self.model.config).isdisjoint(self.cache.tokens()[start:stop])
        if self.archive is not None and is_text:
            self.archive.put(chunk_of(self.cache, start, stop))

    def _adopt(self, blend: BlendCache, ids: list[int]) -> None:
        """Let the conversation's cache hold what a blend cache holds."""
        tokens = len(ids)
        state = {"ids": torch.tensor(ids), "origins": torch.arange(tokens), "active": torch.tensor(self.cache.active)}
        state[f"sequence.{self.cache.active}"] = torch.stack([torch.arange(tokens)] * 2)
        layers: list[Any] = blend.layers
        for index, layer in enumerate(layers):
            state[f"layer.{index}.k"], state[f"layer.{index}.v"] = (
                part[0, :, :tokens].clone() for part in (layer.keys, layer.values)
            )
        self.cache.restore(state)

    def _text(self, asks: bool) -> str:
        """The whole conversation as the template writes it; without a template, the contents one after the other."""
        if not self._messages:
            return ""
        if getattr(self.tokenizer, "chat_template", None):
            return str(self.tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=asks))
        return "".join(message["content"] for message in self._messages)

    def _encode(self, text: str, first: bool) -> list[int]:
        """Token ids; BOS stands before the first ones, if the tokenizer adds one and the template did not write it."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        front = [*front_ids(self.tokenizer)] if first else []
        return ids if ids[: len(front)] == front else [*front, *ids]
