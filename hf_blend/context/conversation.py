# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A conversation: every turn's KV is kept, old turns are shifted out, and can be blended back in.

    chat = Conversation(model, tokenizer, system="You answer briefly.", archive=ChunkStore.open("memory://"))
    print(chat.ask("Who wrote it?", max_new_tokens=64))
    chat.save("chat.session")
    chat.recall(0)                      # the first turn was shifted out: bring it back

A question that fails is forgotten: the conversation is as before, unless its window had to be shifted already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.blend_cache import BlendCache
from ..errors import ConfigError, PromptError
from ..model.anatomy import other_states, refuse_extended, text_config
from ..model.author import author_of
from ..model.modality import placeholder_ids
from ..model.placement import input_device
from ..prefill.notices import other_author
from ..prefill.report import BlendReport
from ..prompt.documents import texts_of
from ..prompt.tokenizer import front_ids
from ..store import ChunkStore
from .reuse import chunk_of, continued, take_back
from .sequence_cache import ShiftCache
from .session import load_session, save_session
from .state_cache import StateCache


@dataclass(frozen=True)
class Turn:
    """A question and its answer: texts, and all of its token ids, marks of the chat template included."""

    question: str
    answer: str
    token_ids: tuple[int, ...]


class Conversation:
    """One conversation with one model. The window bounds its cache; the archive, if there is one, keeps all turns.

    The states of a hybrid model are kept behind each turn, and saved with its K and V. They cannot be moved: where its
    window is full, what stays is prefilled again, documents are computed, and there is no archive.
    """

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
        self._waiting = self._encode(self._text(False), first=True)  # ids that are not in the cache yet
        window: dict[str, Any] = {"window_tokens": window_tokens, "kv_bits": kv_bits}
        window["keep_tokens"] = max(1, len(self._waiting))
        if not other_states(text_config(model), only_keys=True):
            self.cache: Any = ShiftCache(model, **window, allow_unverified=allow_unverified)
        elif archive is None:
            self.cache = StateCache(model, **window)
        else:
            raise ConfigError(
                f"archive={archive!r:.40} came with {type(model).__name__}, whose states hold all tokens before them, "
                "but K and V alone are expected. Leave archive out."
            )
        self.turns: list[Turn] = []
        self._notice = ""  # of the last question
        self.report: BlendReport | None = None  # of the last question that came with documents, or has a notice

    def ask(
        self, question: str, documents: Sequence[Any] = (), *, blend: Mapping[str, Any] | None = None, **options: Any
    ) -> str:
        """Ask, and keep question and answer.

        Documents are put before the question as they are, from the archive or computed alone, and blended behind what
        the conversation holds; `blend` has settings of `BlendConfig`, `report` what it cost.
        """
        if not question:
            raise PromptError("the question is empty, expected some text. Ask something.")
        if self.archive is not None:
            refuse_extended(self.model)
            author_of(self.model).stored_name()
        documents = texts_of(documents)
        before, content = self._text(False), "".join((*documents, question))
        self._messages.append({"role": "user", "content": content})
        text, first = self._text(True)[len(before) :], not before and not self._waiting
        try:
            question_ids, answer_ids = self._answer(text, first, documents, blend or {}, options)
        except BaseException:
            self._messages.pop()
            raise
        answer = str(self.tokenizer.decode(answer_ids, skip_special_tokens=True)).strip()
        self._messages.append({"role": "assistant", "content": answer})
        self._waiting = answer_ids[-1:]
        self._remember(Turn(content, answer, (*question_ids, *answer_ids)))
        return answer

    def recall(self, turn: int, **settings: Any) -> BlendCache:
        """Bring a turn that was shifted out back into the cache, behind the system prompt.

        Its stored KV is moved into place, and a share of it and of what is behind it is recomputed.
        """
        if self.archive is None or not 0 <= turn < len(self.turns):
            raise ConfigError(
                f"turn {turn} of {len(self.turns)} cannot be recalled: an archive and a turn from 0 on are expected."
            )
        held = self.cache.tokens()
        keep, recalled = self.cache.keep_tokens, self.turns[turn].token_ids[:-1]
        room = self.cache.window_tokens - keep - len(recalled) - 1
        rest = held[max(keep, len(held) - max(0, room)) :]
        if room < 0:
            raise ConfigError(f"turn {turn} has {len(recalled)} tokens, which do not fit the window. Enlarge it.")
        self._keep_chunk(0, keep)
        if len(rest) > 1:
            self._keep_chunk(len(held) - len(rest), len(held))
        ids = [*held[:keep], *recalled, *rest]
        blend = BlendCache(self.model, self.archive, **{**settings, "chunk_prefix_ids": ()})
        blend.activate_past_recording()
        with torch.no_grad():
            self.model(self._on_device(ids), past_key_values=blend, logits_to_keep=1)
        self.cache.remove(self.cache.active)
        take_back(self.cache, blend, ids)
        return blend

    def save(self, path: str | Path) -> int:
        """Write the cache to a file; gives its size in bytes. Texts and archive are not part of it."""
        self._flush()
        return save_session(self.cache, path, self.tokenizer)

    def load(self, path: str | Path) -> None:
        """Go on from a saved cache; a file that does not fit leaves the conversation as it was."""
        load_session(self.cache, path, self.tokenizer)
        self._waiting = []

    def _on_device(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=input_device(self.model))

    def _answer(
        self, text: str, first: bool, documents: Sequence[str], blend: Mapping[str, Any], options: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        """The ids of the question, and of its answer, both of which the cache holds but for the last token."""
        self._recompute()
        if isinstance(self.cache, StateCache):
            question_ids = self._encode(text, first)
            return question_ids, self.cache.generate([*self._waiting, *question_ids], **options)
        held, shifts = self.cache.get_seq_length(), self.cache.shifts
        try:
            question_ids = self._blended(text, first, documents, blend) if documents else self._encode(text, first)
            new = question_ids[-1:] if documents else [*self._waiting, *question_ids]
            prompt, room = [*self.cache.tokens(), *new], self.cache.window_tokens - self.cache.keep_tokens
            ids, most = self._on_device(prompt), max(1, room // 2)
            given = {"attention_mask": torch.ones_like(ids)} | (
                {"prefill_chunk_size": most} if len(new) > most else {}
            )
            output = self.model.generate(ids, past_key_values=self.cache, **{**given, **options})
        except BaseException:
            if self.cache.shifts == shifts:
                self.cache.crop(held - self.cache.get_seq_length())
            raise
        return question_ids, output[0, len(prompt) :].tolist()

    def _flush(self) -> None:
        """Bring into the cache what is not there yet: the last token of the last answer."""
        if self._waiting:
            self._recompute()
        if self._waiting and isinstance(self.cache, StateCache):
            self.cache.extend(self._waiting)
        elif self._waiting:
            with torch.no_grad(), self.cache:
                self.model(self._on_device(self._waiting), past_key_values=self.cache)
        self._waiting = []

    def _recompute(self) -> None:
        """Have computed again what the cache holds of the model when it was another one, and say so in the report."""
        computed = self.cache.recompute()
        self._notice = other_author(self.cache.get_seq_length(), computed)
        if self._notice:
            self.report = BlendReport(notice=self._notice)

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

    def _blended(self, text: str, first: bool, documents: Sequence[str], settings: Mapping[str, Any]) -> list[int]:
        """Compute what is new with its documents blended, but for the last token; gives the ids of `text`."""
        head, found, tail = text.partition("".join(documents))
        if not found:
            raise PromptError(
                f"{len(documents)} documents are not in what the chat template writes, {text!r:.40}, where they are "
                "expected as they are. Strip white space from their ends."
            )
        pieces = self._encode(head, first), [self._encode(one) for one in documents], self._encode(tail)
        begin, question_ids = [*self._waiting, *pieces[0]], [*pieces[0], *chain(*pieces[1]), *pieces[2]]
        self.cache.make_room(len(self._waiting) + len(question_ids))
        held = self.cache.tokens()
        store = ChunkStore.open("memory://") if self.archive is None else self.archive
        cache = continued(self.cache, store, **settings)
        history = torch.tensor([held]) if held else None
        inputs = cache.inputs(None, prefix=begin, chunks=pieces[1], question=pieces[2], history=history)
        new, mask = inputs["input_ids"][:, len(held) :], inputs["attention_mask"]
        with torch.no_grad():
            self.model(new, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
        take_back(self.cache, cache, new[0, :-1].tolist(), more=1)
        cache.report.notice = " ".join(filter(None, (self._notice, cache.report.notice)))
        self.report = cache.report
        return question_ids

    def _text(self, asks: bool) -> str:
        """The whole conversation as the template writes it; without a template, the contents one after the other."""
        if not self._messages:
            return ""
        if getattr(self.tokenizer, "chat_template", None):
            return str(self.tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=asks))
        return "".join(message["content"] for message in self._messages)

    def _encode(self, text: str, first: bool = False) -> list[int]:
        """Token ids; BOS stands before the first ones, if the tokenizer adds one and the template did not write it."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        front = [*front_ids(self.tokenizer)] if first else []
        return ids if ids[: len(front)] == front else [*front, *ids]
