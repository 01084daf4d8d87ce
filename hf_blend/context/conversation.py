# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A conversation that keeps the KV of its turns, shifts old turns out, and can blend them back in.

    chat = Conversation(model, tokenizer, system="You answer briefly.", archive=ChunkStore.open("memory://"))
    print(chat.ask("Who wrote it?", max_new_tokens=64))
    chat.save("chat.session")
    chat.recall(0)                      # the first turn was shifted out: bring it back

For each question the chat template renders all messages, as `apply_chat_template` does, and the model sees these
tokens. A template may write earlier turns otherwise than before: cached tokens stay as far as they are the same, the
others are dropped, and the rest is computed. A question that fails is forgotten.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.blend_cache import BlendCache
from ..cache.idle_healing import IdleHealing
from ..config import BlendConfig
from ..errors import ConfigError, PromptError, StoreError
from ..model.anatomy import other_states, refuse_extended, text_config
from ..model.author import Author, author_of
from ..model.cache_keyword import cache_argument
from ..model.modality import placeholder_ids
from ..model.placement import input_device
from ..prefill.notices import other_author
from ..prefill.report import BlendReport
from ..prompt.documents import texts_of
from ..prompt.messages import build_messages, check_template, has_template, render
from ..prompt.pieces import NamedPrompt, Span, TextPrompt, check_text, shared_tokens, tokenize, tokenize_chunks
from ..prompt.tokenizer import front_ids
from ..store import ChunkStore
from .reuse import chunk_of, continued, expect, take_back
from .sequence_cache import ShiftCache, check_window
from .session import read_session, save_session
from .state_cache import END, StateCache

_OURS = ("add_generation_prompt", "continue_final_message", "documents")  # arguments of templates that are no choice
_SEAM_TOKENS = 8  # so many tokens more may belong to the mark before a question


@dataclass(frozen=True)
class Turn:
    """A question and its answer: texts, and the token ids that were new with them.

    The ids include marks of the chat template, and what it wrote otherwise than before in front of the question.
    """

    question: str
    answer: str
    token_ids: tuple[int, ...]


class Conversation:
    """One conversation with one model. The window bounds its cache; the archive, if there is one, keeps all turns.

    When the window is full, the model sees the first and the last tokens of what the template writes. If the template
    changes tokens that have left the window, the whole prompt is prefilled again. `rewritten_tokens` is how many
    cached tokens the template wrote otherwise for the last question.

    The states of a hybrid model cannot be moved or cut (see `StateCache`). When its window is full, or the template
    rewrites earlier turns, the tokens that stay are prefilled again, from a saved state if there is one. Documents are
    computed, not blended, and there is no archive.
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
        template: Mapping[str, Any] | None = None,
        heal: str | None = None,
    ) -> None:
        """Begin; `template` has further arguments of `apply_chat_template`, such as `tools` or `enable_thinking`.

        heal="idle": what documents left inexact is computed again in a thread of its own, from the end of a turn until
        the next call of this conversation, which waits for a block of 64 tokens at most; see `heal`.
        """
        if heal not in (None, "idle"):
            raise ConfigError(f"heal={heal!r}, expected 'idle' or None. Call heal() yourself where None is passed.")
        self.model, self.tokenizer, self.archive = model, tokenizer, archive
        self.template = check_template(template or {}, *_OURS)
        self._messages: list[dict[str, str]] = [{"role": "system", "content": _checked(system)}] if system else []
        self._said: list[int] = []  # what was computed of the conversation, also what has left the window
        window: dict[str, Any] = {"window_tokens": window_tokens, "kv_bits": kv_bits}
        self._opening = self._opening_tokens(self._messages)
        window["keep_tokens"] = max(1, self._opening)
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
        self.rewritten_tokens = 0
        self._healing = IdleHealing() if heal == "idle" else None
        self._healed: tuple[BlendCache, list[int]] | None = None  # a copy, healed until the next call, and its ids
        self._first_inexact: dict[Author, int] = {}  # by who computed them; see `_inexact`
        self._notice = ""  # of the last question
        self.report: BlendReport | None = None  # of the last question that came with documents, or has a notice

    def ask(
        self, question: str, documents: Sequence[Any] = (), *, blend: Mapping[str, Any] | None = None, **options: Any
    ) -> str:
        """Ask a question and return the answer; both are kept.

        Args:
            question: a text.
            documents: texts that come before the question; their KV is from the archive, or computed alone, and is
                blended behind the cached tokens.
            blend: settings of `BlendConfig` for the documents; `report` then says what they cost.
            **options: of `generate`.

        Raises:
            PromptError: the question is empty, does not fit the window, or the template refuses it.
        """
        self._stop_healing()
        if not _checked(question):
            raise PromptError(f"the question is empty, {question!r}, expected some text. Ask something.")
        if self.archive is not None:
            refuse_extended(self.model)
            author_of(self.model).stored_name()
        documents = texts_of(documents)
        content = "".join((*map(_checked, documents), question))
        messages = [*self._messages, {"role": "user", "content": content}]
        prompt, config = self._prompt(messages, documents), BlendConfig.from_dict({**(blend or {})})
        self._recompute()
        same = shared_tokens(prompt.ids, self._said)
        if self._said and same < self._opening:  # the beginning is written otherwise than before
            self._keep_opening(self._opening_tokens(messages))
        start = max(len(prompt.history), same, self._opening)
        ids, cached = self._in_window(prompt.ids, same)
        self.rewritten_tokens = self.cache.get_seq_length() - cached
        if isinstance(self.cache, StateCache):
            answer_ids = self.cache.generate(ids, self._question_tokens(prompt, messages), **options)
        else:
            answer_ids = self._answer(prompt, ids, cached, config if documents else None, options)
        answer = str(self.tokenizer.decode(answer_ids, skip_special_tokens=True)).strip()
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        self._said = [*prompt.ids, *answer_ids[:-1]]
        self._remember(Turn(content, answer, (*prompt.ids[start:], *answer_ids)))
        if self._healing is not None and self._inexact is not None:
            self._healed = self._to_heal(), self.cache.tokens()
            self._healing.start(self._healed[0], torch.tensor([self._healed[1]]))
        return answer

    def heal(self, tokens: int | None = None) -> int:
        """Compute what blending left inexact again, from left to right, so that the next turn is a full prefill's.

        As `BlendCache.heal`, answers included. What has been shifted out of the window, and what is behind it, saw
        tokens that are gone: it stays as it is, and counts as exact.

        Returns:
            How many tokens are not exact; 0 where `tokens`, how many more are to be, is None.
        """
        self._stop_healing()
        if self._inexact is None:
            return 0
        cache = self._to_heal()
        cache.heal(tokens, [self.cache.tokens()])
        self._hold(cache)
        return 0 if self._inexact is None else self.cache.get_seq_length() - self._inexact

    @property
    def _inexact(self) -> int | None:
        """The first token whose K and V are not a full prefill's; None: all are. Each adapter has its own."""
        return self._first_inexact.get(self._computed_by())

    @_inexact.setter
    def _inexact(self, column: int | None) -> None:
        if column is None:
            self._first_inexact.pop(self._computed_by(), None)
        else:
            self._first_inexact[self._computed_by()] = column

    def _computed_by(self) -> Author:
        author: Author | None = self.cache.computed_by(getattr(self.cache, "active", None))
        return author or author_of(self.model)

    def _to_heal(self) -> BlendCache:
        """A copy of what the conversation holds, exact up to the same token."""
        cache = continued(self.cache, ChunkStore.open("memory://"))
        cache.kv.frontier.blend(self._inexact or 0)
        return cache

    def _hold(self, cache: BlendCache) -> None:
        """Hold the K and V of a copy that was healed."""
        ids = self.cache.tokens()
        self.cache.remove(self.cache.active)
        take_back(self.cache, cache, ids)
        self._inexact = cache.kv.frontier.column

    def _stop_healing(self) -> None:
        """Hold what was healed since the last turn."""
        if self._healing is not None and self._healed is not None:
            self._healing.stop()
            (cache, ids), self._healed = self._healed, None
            if ids == self.cache.tokens():  # nobody has changed the cache meanwhile
                self._hold(cache)

    def recall(self, turn: int, **settings: Any) -> BlendCache:
        """Bring a turn that was shifted out back into the cache, behind the system prompt.

        Its stored KV is moved into place, and a share of it and of the tokens behind it is recomputed, by `settings`
        of `BlendConfig`. Turns count from 0. The blend cache that is returned has a `report`.

        Raises:
            ConfigError: there is no archive or no such turn, or it does not fit the window.
        """
        self._stop_healing()
        if self.archive is None or not 0 <= turn < len(self.turns):
            raise ConfigError(
                f"turn {turn} of {len(self.turns)} cannot be recalled: an archive and a turn from 0 on are expected."
            )
        cached, keep = self.cache.tokens(), self.cache.keep_tokens
        recalled = self.turns[turn].token_ids[0 if turn or self._opening else keep : -1]
        room = self.cache.window_tokens - keep - len(recalled) - 1
        rest = cached[max(keep, len(cached) - max(0, room)) :]
        if room < 0:
            raise ConfigError(f"turn {turn} has {len(recalled)} tokens, which do not fit the window. Enlarge it.")
        self._keep_chunk(0, keep)
        if len(rest) > 1:
            self._keep_chunk(len(cached) - len(rest), len(cached))
        ids = [*cached[:keep], *recalled, *rest]
        blend = BlendCache(self.model, self.archive, **{**settings, "chunk_prefix_ids": ()})
        blend.activate_past_recording()
        with torch.no_grad():
            self.model(self._on_device(ids), **cache_argument(self.model, blend), logits_to_keep=1)
        self.cache.remove(self.cache.active)
        take_back(self.cache, blend, ids)
        self._inexact = blend.kv.frontier.column
        return blend

    def save(self, path: str | Path) -> int:
        """Write cache, messages and turns to a file, and return its size in bytes; the archive is not saved."""
        self._stop_healing()
        content = {
            "messages": self._messages, "turns": list(map(asdict, self.turns)), "said": self._said,
            "inexact": self._inexact,
        }  # fmt: skip
        return save_session(self.cache, path, self.tokenizer, conversation=json.dumps(content).encode())

    def load(self, path: str | Path) -> None:
        """Load a saved conversation in place of this one; a file that is refused leaves this one as it was."""
        self._stop_healing()
        session = read_session(self.cache, path, self.tokenizer)
        if not session.conversation:
            raise StoreError(
                f"the session {path} holds no messages, but a file of Conversation.save is expected: the template "
                "writes them again for the next question. Take it up with load_session into a cache."
            )
        with session.refusing():
            messages, turns, said, inexact = _parsed(session.conversation)
        opening = self._opening_tokens(messages)
        check_window(self.cache.window_tokens, max(1, opening))
        session.restore()
        self._first_inexact = {}
        self._messages, self.turns, self._said, self._inexact = messages, turns, said, inexact
        self._keep_opening(opening)

    def _on_device(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=input_device(self.model))

    def _answer(
        self, prompt: TextPrompt, ids: list[int], cached: int, config: BlendConfig | None, options: dict[str, Any]
    ) -> list[int]:
        """The ids of the answer; the cache keeps its first `cached` tokens and gets all of the answer but the last."""
        shifts = self.cache.shifts
        self._crop(cached)
        try:
            if config is not None:
                ids = self._blended(prompt, ids[cached:], config)
            room = self.cache.window_tokens - self.cache.keep_tokens
            most = max(options.pop("prefill_chunk_size", None) or room // 2, 1)
            while len(new := ids[self.cache.get_seq_length() :]) > most:  # generate of 5.17 cannot continue in parts
                with torch.no_grad(), self.cache:
                    self.model(self._on_device(new[:most]), **cache_argument(self.model, self.cache), logits_to_keep=1)
                ids = [*self.cache.tokens(), *new[most:]]
            options = {"attention_mask": self._on_device([1] * len(ids)), **options}
            output = self.model.generate(self._on_device(ids), **options, **cache_argument(self.model, self.cache))
        except BaseException:
            if self.cache.shifts != shifts:  # what is still as the template writes it
                ids, cached = [*prompt.ids], shared_tokens(prompt.ids, self.cache.tokens())
            self._crop(cached)
            self._said = [*prompt.ids[: len(prompt.ids) - len(ids) + cached]]
            raise
        if self.cache.shifts != shifts:
            self._inexact = None
        answer_ids: list[int] = output[0, len(ids) :].tolist()
        return answer_ids

    def _in_window(self, ids: Sequence[int], same: int) -> tuple[list[int], int]:
        """The tokens of a prompt that the model sees, and how many of these are cached.

        The first `same` tokens of the prompt are as they were said. The last cached tokens are the last ones said.
        So if all tokens that have left the window are the same, new tokens come behind the cached ones; else the
        model sees the whole prompt again.
        """
        cached, said = self.cache.tokens(), self._said
        if cached != said:
            behind, gone = shared_tokens(cached[::-1], said[::-1]), len(said) - len(cached)
            begins = shared_tokens(ids, cached)
            is_same = same >= len(said) - behind and begins >= self.cache.keep_tokens
            ids, same = ([*cached[: same - gone], *ids[same:]], same - gone) if is_same else (ids, begins)
        return [*ids], min(same, len(ids) - 1)

    def _crop(self, tokens: int) -> None:
        """Drop cached tokens behind the first `tokens`."""
        if (more := self.cache.get_seq_length() - tokens) > 0:
            self.cache.crop(-more)
        if self._inexact is not None and tokens <= self._inexact:
            self._inexact = None

    def _question_tokens(self, prompt: TextPrompt, messages: Sequence[Mapping[str, str]]) -> int:
        """At most how many tokens a prompt has from the last question on; tokens before it may leave the window."""
        if not has_template(self.tokenizer, self.template):
            return len(prompt.ids) - len(prompt.history)
        text = render(self.tokenizer, messages, **self._template)
        start = text.rfind(messages[-1]["content"].strip())
        return len(tokenize(self.tokenizer, text[max(0, start) :])) + _SEAM_TOKENS

    def _recompute(self) -> None:
        """Compute cached tokens again that the model computed before it changed, and say so in the report."""
        computed = self.cache.recompute()
        if (self._inexact or 0) >= self.cache.get_seq_length() - computed:  # these are exact
            self._inexact = None
        self._notice = other_author(self.cache.get_seq_length(), computed)
        if self._notice:
            self.report = BlendReport(notice=self._notice)

    def _remember(self, turn: Turn) -> None:
        self.turns.append(turn)
        cached, keep = self.cache.get_seq_length(), self.cache.keep_tokens
        start = cached - len(turn.token_ids) + 1  # its last token is not in the cache yet
        if self.archive is not None and (start >= keep or (start == 0 and len(self.turns) == 1)):
            self._keep_chunk(max(start, keep), cached)

    def _keep_chunk(self, start: int, stop: int) -> None:
        self.cache.compact()
        is_text = placeholder_ids(self.model.config).isdisjoint(self.cache.tokens()[start:stop])
        if self.archive is not None and is_text:
            self.archive.put(chunk_of(self.cache, start, stop))

    def _blended(self, prompt: TextPrompt, new: Sequence[int], config: BlendConfig) -> list[int]:
        """Compute new tokens, with their documents blended, but not the last one; returns all cached ids and it."""
        self.cache.make_room(len(new))
        cached = self.cache.tokens()
        ids = [*cached, *new]
        moved = len(ids) - len(prompt.ids)
        spans = [span._replace(start=span.start + moved) for span in prompt.known]
        spans = [span for span in spans if span.start >= len(cached)]
        if not spans:
            return ids
        store = ChunkStore.open("memory://") if self.archive is None else self.archive
        cache = continued(self.cache, store, config=config)
        opening = 0 if cached else prompt.opening
        inputs = expect(cache, self.tokenizer, NamedPrompt(tuple(ids), tuple(spans), opening, tuple(cached)))
        with torch.no_grad():
            new_ids, argument = inputs["input_ids"][:, len(cached) :], cache_argument(self.model, cache)
            self.model(new_ids, attention_mask=inputs["attention_mask"], **argument, logits_to_keep=1)
        take_back(self.cache, cache, new[:-1], more=1)
        if cache.kv.frontier.column is not None:
            self._inexact = min(cache.kv.frontier.column, len(ids) if self._inexact is None else self._inexact)
        cache.report.notice = " ".join(filter(None, (self._notice, cache.report.notice)))
        self.report = cache.report
        return ids

    @property
    def _template(self) -> dict[str, Any]:
        return {**self.template, "add_generation_prompt": True}

    def _prompt(self, messages: Sequence[Mapping[str, str]], documents: Sequence[str] = ()) -> TextPrompt:
        """All messages as the template writes them, and the spans of documents in them.

        Without a template: the tokens of all turns, then each piece of the last message.
        """
        if has_template(self.tokenizer, self.template):
            return build_messages(self.tokenizer, messages, documents, self._template)
        before = [*self._plain_opening(messages), *(token for turn in self.turns for token in turn.token_ids)]
        ids, spans = before or [*front_ids(self.tokenizer)], list[Span]()
        for chunk in tokenize_chunks(self.tokenizer, documents):
            spans.append(Span.whole(len(ids), chunk))
            ids = [*ids, *chunk]
        question = messages[-1]["content"][len("".join(documents)) :]
        ids = [*ids, *tokenize(self.tokenizer, question)]
        return TextPrompt(tuple(ids), tuple(spans), history=tuple(before))

    def _keep_opening(self, opening: int) -> None:
        """Keep so many first tokens in the window."""
        check_window(self.cache.window_tokens, max(1, opening))
        self._opening, self.cache.keep_tokens = opening, max(1, opening)

    def _opening_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """How many first tokens all conversations with this system prompt share; 0 without one."""
        if not messages or messages[0]["role"] != "system":
            return 0
        if not has_template(self.tokenizer, self.template):
            return len(self._plain_opening(messages))
        roles = ("user", "assistant", "user")
        turns = [{"role": role, "content": content} for role, content in zip(roles, "abc", strict=True)]
        first, later = (self._prompt([messages[0], *own]).ids for own in (turns[2:], turns))
        return shared_tokens(first, later)

    def _plain_opening(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The tokens of the system prompt, if there is one, without a template."""
        if not messages or messages[0]["role"] != "system":
            return ()
        front, ids = front_ids(self.tokenizer), tokenize(self.tokenizer, messages[0]["content"])
        return ids if ids[: len(front)] == front else (*front, *ids)


def _checked(text: Any) -> str:
    """A text, which a tokenizer can take."""
    if not isinstance(text, str):
        raise PromptError(f"{text!r:.60} came where a text is expected. Decode it, or convert it.")
    check_text(text)
    return text


def _parsed(content: bytes) -> tuple[list[dict[str, str]], list[Turn], list[int], int | None]:
    """Messages, turns, what was said and the first token that is not exact, as `save` writes them.

    Raises anything where the content is something else.
    """
    parts = json.loads(content)
    messages = [{name: _checked(message[name]) for name in ("role", "content")} for message in parts["messages"]]
    turns = [
        Turn(_checked(row["question"]), _checked(row["answer"]), _ids(row["token_ids"])) for row in parts["turns"]
    ]
    inexact = parts.get("inexact")
    return messages, turns, [*_ids(parts["said"])], None if inexact is None else _ids([inexact])[0]


def _ids(values: Any) -> tuple[int, ...]:
    if not (isinstance(values, list) and all(type(value) is int and 0 <= value < END for value in values)):
        raise PromptError(f"{values!r:.60} are no token ids, but a list of them is expected. Save it again.")
    return tuple(values)
