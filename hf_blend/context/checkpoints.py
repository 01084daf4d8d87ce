# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Exact prefix reuse for any model whose cache is stock, hybrids above all: states are saved where prefixes end.

    checkpoints = StateCheckpoints(model, "checkpoints", max_bytes=10 << 30)
    cache = checkpoints.prefill(prompt_ids, ends=[prefix_tokens])   # documents: computed and saved, or only read
    output = model.generate(prompt_ids, past_key_values=cache)      # computes only what is behind them
    checkpoints.save(cache, output)                                 # the end of the turn
    cache = checkpoints.resume(next_prompt_ids)                     # the longest saved prefix of another prompt

The state of linear attention, of a state space or of a convolution holds every token before it and cannot be cut, so
a prefix can be continued only from where its state was saved. Where that is, is declared: at the end of what prompts
have in common, at the end of a turn, and where two prompts that were prefilled part. A state that is saved inside a
question is exact and never found again. Differs from llama.cpp's checkpoints and SGLang's MambaRadixCache: files,
which other processes find and which prove what they are before they are used.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import plugins
from ..errors import ConfigError, PromptError, StoreError
from ..model.anatomy import stock_cache
from ..model.fingerprint import fingerprint
from ..model.identity.canonical import canonical, notes_kept
from ..model.modality import other_inputs, refuse_placeholders
from ..store.budget import BoundedTier
from ..store.catalog import entry_name
from ..store.format import EntryFile, pack_entry
from ..store.index import Index
from ..store.seal import check_secret, keyed
from ..store.tiers.base import EntryFault, as_fault
from .continuing import Continuing, Parts, continuing
from .handed import complaint, handed
from .tables import regime_tokens

__all__ = ["CheckpointStats", "StateCheckpoints"]

logger = logging.getLogger(__name__)

KIND = "hf_blend.checkpoint/2"
LEAST_FORK_TOKENS = 64  # a shorter beginning that two prompts share is computed sooner than it is read
_NAMESPACE = "\0checkpoints"  # of no chunk
_LENGTH_DIGITS = 8  # in hex, at the end of a name: tokens of the prefix


@dataclass
class CheckpointStats:
    """What happened since these checkpoints were opened."""

    hits: int = 0
    misses: int = 0
    resumed_tokens: int = 0
    saved: int = 0
    saved_bytes: int = 0
    evicted: int = 0
    rejected: int = 0
    faults: int = 0


@dataclass(frozen=True)
class _Known:
    """A prefix that this process read or wrote: its ids `[tokens]`, and the entries that hold it, shortest first."""

    ids: Tensor
    chain: tuple[str, ...]


class StateCheckpoints:
    """Saved prefixes of one model in one folder, which any number of processes and models may share.

    They are entries of the store's format, in a tier under a cap as chunks are. An entry holds the states at the end
    of a prefix, and the K and V of those tokens that the next shorter checkpoint does not hold: K and V are saved
    once, however many turns follow each other.
    """

    def __init__(
        self, model: nn.Module, folder: str | Path, *, max_bytes: int | None = None, secret: bytes | None = None
    ) -> None:
        """Open a folder.

        Args:
            model: a causal language model; it is left as it was.
            folder: is made if needed, for its owner alone.
            max_bytes: most that the files in the folder take together, of all models; the least recently used leave
                first. None: no bound.
            secret: where others may write to the folder: signs the files, which are then found and read only with it.

        Raises:
            ConfigError: `max_bytes` is below 1, or the secret is not bytes.
            StoreError: the folder cannot be made.
        """
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"max_bytes is {max_bytes}, expected a number of bytes from 1 on, or None.")
        self.model, self.folder, self.max_bytes = model, Path(folder), max_bytes
        self.stats = CheckpointStats()
        self._secret, self._known = check_secret(secret), dict[str, _Known]()
        try:
            disk = plugins.load("store.tiers", "disk")(self.folder / "states")
            policy = plugins.load("store.eviction", "lru")()
            self._tier = BoundedTier(disk, max_bytes, policy, Index(self.folder / "index" / "states.sqlite", policy))
            self._tier.remove_orphans()
        except (OSError, StoreError) as error:
            raise StoreError(f"{folder} cannot hold checkpoints: {error}. Give one that can be written.") from error

    @property
    def nbytes(self) -> int:
        """Bytes of all checkpoints in the folder."""
        return sum(self._entries().values())

    def resume(self, input_ids: Any, **inputs: Any) -> Any:
        """Make a cache that holds the longest saved prefix of a prompt.

        Pass it to `generate` with the whole prompt. At least one token is left to be computed. For a model whose code
        does not continue a state by several tokens at once, all tokens but the last are computed here one by one.
        Nothing is found for a prompt beyond the length at which rotary frequencies change (longrope, dynamic).

        Args:
            input_ids: `[1, tokens]`, or the ids of one prompt.
            **inputs: what else the tokenizer gave; nothing but text without padding is taken.

        Returns:
            A stock cache of the model, filled with exactly what was computed of the prefix; empty where none is saved.

        Raises:
            PromptError: there are several prompts, padding, or other inputs than text.
            UnsupportedModelError: the model's states cannot be continued.
        """
        ids = self._prompt(input_ids, inputs)
        held, cache = self._longest(ids, len(ids) - 1 if self._is_within(len(ids)) else 0)
        return self._ready(cache, ids, held)

    def prefill(self, input_ids: Any, ends: Sequence[int] | None = None, **inputs: Any) -> Any:
        """Compute a prompt up to declared ends, and save the states there.

        What is saved already is not computed again. Where the prompt parts from one that this object has saved or
        found before, the states are saved too: so the third prompt of many with an equal beginning finds it, also if
        nobody declared where it ends.

        Args:
            input_ids: `[1, tokens]`, or the ids of one prompt, or of the beginning that many share.
            ends: how many tokens the prefixes have that are saved; None is all that is given. Tokens behind the last
                are left to `generate`, as in `resume`.
            **inputs: as in `resume`.

        Returns:
            A stock cache that holds the prompt up to the last end, for `generate` with the whole prompt.

        Raises:
            ConfigError: an end is not within the prompt.
            PromptError: as in `resume`, or the model's rotary frequencies change within the prompt.
            UnsupportedModelError: as in `resume`.
        """
        ids = self._prompt(input_ids, inputs)
        ends = [len(ids)] if ends is None else ends
        given = isinstance(ends, Sequence) and len(ends) > 0
        if not given or not all(isinstance(end, int) and 0 < end <= len(ids) for end in ends):
            raise ConfigError(
                f"ends are {ends!r:.60}, expected numbers from 1 to the {len(ids)} tokens of the prompt."
            )
        self._refuse_crossing(len(ids))
        held, cache = self._longest(ids, max(ends))
        fork = max((_in_common(ids[: max(ends)], known.ids) for known in self._known.values()), default=0)
        stops = {*ends, fork} if fork - held >= LEAST_FORK_TOKENS else {*ends}
        for start, end in pairwise([held, *sorted(stop for stop in stops if stop > held)]):
            self._advance(cache, ids[start:end])
            self.save(cache, ids)
        return self._ready(cache, ids, max(ends))

    def save(self, cache: Any, input_ids: Any, **inputs: Any) -> int:
        """Save the states of a cache as they are now, such as at the end of a turn.

        Args:
            cache: of `resume` or `prefill`, continued by `generate` or by calls of the model. It has noted what it was
                filled with: of nothing else is known what it holds.
            input_ids: `[1, tokens]`, or the ids of the prompt and its answer, of which the cache holds the first.
            **inputs: as in `resume`.

        Returns:
            Bytes that were written; 0 where this prefix is saved already, or did not fit.

        Raises:
            ConfigError: the cache is not of `resume` or `prefill`; or it was filled with other tokens, at other
                positions, by another model, in training mode, under autocast, or with hooks.
            PromptError: as in `prefill`.
            UnsupportedModelError: as in `resume`.
        """
        ids, form = self._prompt(input_ids, inputs), self._way.form
        tokens = form.tokens(cache)
        self._refuse_crossing(tokens)
        if tokens > len(ids):
            raise ConfigError(f"the cache holds {tokens} tokens, expected at most the {len(ids)} that are given.")
        ids, entries = ids[:tokens], self._entries()
        if why := complaint(cache, ids, self._identity["model"]):
            raise ConfigError(
                f"a {type(cache).__name__} of {tokens} tokens cannot be saved, because {why}, but the cache of "
                "resume() or prefill() is expected, filled by this model alone with the tokens that are given. Get it "
                "from resume()."
            )
        self._known = {name: known for name, known in self._known.items() if name in entries}
        names = self._names(ids, {*_lengths(entries), tokens})
        if names[tokens] in entries:
            return 0
        chain = self._chain(names, entries)
        start = len(self._known[chain[-1]].ids) if chain else 0
        parts = {name: part.detach().cpu() for name, part in form.take(cache, start, tokens).items()}
        try:
            form.check(parts, start, tokens)
        except EntryFault as fault:
            raise ConfigError(f"a cache of {tokens} tokens cannot be saved: {fault}. Prefill it again.") from fault
        about = {**self._identity, "start": str(start)}
        content = pack_entry(KIND, about, {"ids": ids[start:], **parts}.items(), self._secret)
        return self._write(names[tokens], content, ids, chain)

    @property
    def _identity(self) -> dict[str, str]:
        """Who computes: weights and structure, and the code whose states these are."""
        import transformers

        return {"model": fingerprint(self.model), "transformers": transformers.__version__}

    @property
    def _way(self) -> Continuing:
        return continuing(self.model, fingerprint(self.model))

    def _prompt(self, input_ids: Any, inputs: Mapping[str, Any]) -> Tensor:
        """The ids of the only prompt, `[tokens]`, on the CPU."""
        try:
            ids = torch.as_tensor(input_ids).cpu()
            mask = torch.as_tensor(inputs.get("attention_mask", True))
        except (TypeError, ValueError, RuntimeError) as error:
            raise PromptError(f"the prompt is a {type(input_ids).__name__}, expected token ids ({error}).") from error
        ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
        if ids.dim() != 1 or not len(ids) or ids.dtype not in (torch.int64, torch.int32):
            raise PromptError(
                f"the prompt is {tuple(ids.shape)} of {ids.dtype}, expected the token ids of one prompt, [1, tokens]."
            )
        others = other_inputs({name: value for name, value in inputs.items() if name != "attention_mask"})
        if others or not bool(mask.all()):
            raise PromptError(
                f"the prompt comes with {others[0] if others else 'padding'}, expected text without padding: states "
                "that saw anything else are found by the ids of the text alone. Prefill such prompts as a whole."
            )
        refuse_placeholders(self.model, ids.tolist(), "a saved prefix")
        return ids.long()

    def _handed(self, cache: Any, ids: Tensor) -> Any:
        """A cache that holds these tokens, and notes what it is filled with."""
        return handed(cache, self.model, ids, self._identity["model"], self._way.at_once)

    def _ready(self, cache: Any, ids: Tensor, held: int) -> Any:
        """A cache that `generate` can continue: with one token left where several would be computed wrongly."""
        if 0 < held < len(ids) - 1 and not self._way.at_once:
            self._advance(cache, ids[held:-1])
        return cache

    def _is_within(self, tokens: int) -> bool:
        """Whether so many tokens are computed by the same rotary frequencies as fewer are."""
        most = regime_tokens(self.model)
        return most is None or tokens <= most

    def _refuse_crossing(self, tokens: int) -> None:
        if not self._is_within(tokens):
            raise PromptError(
                f"{tokens} tokens were given, but at most {regime_tokens(self.model)} are expected: behind them the "
                "rotary frequencies of this model are others. Prefill longer prompts as a whole."
            )

    def _advance(self, cache: Any, ids: Tensor) -> None:
        """Let a cache hold some more tokens."""
        with canonical(self.model), notes_kept(self.model):
            self._way.advance(self.model, cache, ids)

    def _longest(self, ids: Tensor, most: int) -> tuple[int, Any]:
        """The longest saved prefix with at most so many tokens: their number, and a cache that holds it."""
        way, entries = self._way, self._entries()
        names = self._names(ids, {length for length in _lengths(entries) if length <= most})
        for tokens in sorted(names, reverse=True):
            segments = self._read_chain(names, ids, tokens) if names[tokens] in entries else None
            if segments is not None:
                self.stats.hits += 1
                self.stats.resumed_tokens += tokens
                return tokens, self._handed(way.form.fill(segments, tokens), ids[:tokens])
        self.stats.misses += 1
        return 0, self._handed(stock_cache(self.model), ids[:0])

    def _read_chain(self, names: Mapping[int, str], ids: Tensor, tokens: int) -> list[Parts] | None:
        """What the entries of a prefix hold, the beginning first; None where one of them cannot be used."""
        segments: list[Parts] = []
        chain: list[str] = []
        stop, identity = tokens, self._identity
        try:
            while stop:
                chain.insert(0, names.get(stop, ""))
                stop, parts = self._read(chain[0], identity, ids[:stop])
                segments.insert(0, parts)
        except FileNotFoundError:  # its beginning had to leave, so that it can be of no use
            self._remove(chain[-1])
            return None
        except (OSError, EntryFault) as error:
            self.stats.faults += 1
            logger.warning("the checkpoint %s is passed over: %s", chain[0], error)
            for name in {chain[0], chain[-1]} if isinstance(error, EntryFault) else ():
                self._remove(name)
            return None
        self._remember(ids[:tokens], chain)
        return segments

    def _read(self, name: str, identity: Mapping[str, str], ids: Tensor) -> tuple[int, Parts]:
        """What an entry holds of a prefix, and from which token on; everything in it is checked."""
        source = self._tier.open(name) if name else None
        if source is None:
            raise FileNotFoundError(name)
        with closing(source):
            file = EntryFile(source, KIND, self._secret, self._way.form.nbytes(len(ids)) + ids.nbytes)
            about = file.header.about
            for what, expected in identity.items():
                if about.get(what) != expected:
                    raise EntryFault("fingerprint", f"it was saved by another {what}, {about.get(what)!r:.40}")
            parts = file.tensors()
        with as_fault("its tokens"):
            start, found = int(about["start"]), parts.pop("ids")
            if not 0 <= start < len(ids) or not torch.equal(found, ids[start:]):
                raise EntryFault("key", f"it holds {found.numel()} other tokens from {start} on")
        self._way.form.check(parts, start, len(ids))
        return start, parts

    def _write(self, name: str, content: Sequence[memoryview], ids: Tensor, chain: Sequence[str]) -> int:
        """Write an entry, if there is room; gives its size, or 0."""
        nbytes = sum(map(len, content))
        self._tier.protect(chain)
        try:
            self._tier.replace(name, content)
        except OSError as error:
            self.stats.rejected += 1
            logger.warning("a checkpoint of %s tokens, %s bytes, is not saved: %s", len(ids), nbytes, error)
            return 0
        finally:
            self._tier.release(chain)
            self.stats.evicted = self._tier.stats.group("evicted").get(self._tier.name, 0)
        self.stats.saved += 1
        self.stats.saved_bytes += nbytes
        self._remember(ids, [*chain, name])
        return nbytes

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            self._tier.delete(name)

    def _remember(self, ids: Tensor, chain: Sequence[str]) -> None:
        """A prefix was used. What it begins with counts as used later, so that it never leaves before it."""
        self._known[chain[-1]] = _Known(ids.clone(), tuple(chain))
        for name in reversed(chain):
            self._tier.use(name)
        self._tier.apply()

    def _chain(self, names: Mapping[int, str], entries: Mapping[str, Any]) -> tuple[str, ...]:
        """The entries of the longest prefix that this process has read or written, and that are still there."""
        known = (self._known.get(names[tokens]) for tokens in sorted(names, reverse=True))
        return next((one.chain for one in known if one is not None and entries.keys() >= {*one.chain}), ())

    def _entries(self) -> dict[str, int]:
        """All checkpoints in the folder, of all models, and their bytes."""
        with suppress(OSError):
            self._tier.sync(self._space)
            return {name: size for name, size in self._tier.index.in_order() if name.startswith(self._space)}
        return {}

    @property
    def _space(self) -> str:
        return entry_name(self._secret, _NAMESPACE, "")[:3]

    def _names(self, ids: Tensor, lengths: Iterable[int]) -> dict[int, str]:
        """The names under which the first tokens of a prompt are saved, by their number."""
        root = keyed(self._secret, "checkpoint", "\0".join(self._identity.values()))
        state, content, done, names = hashlib.sha256(root.encode()), ids.numpy().tobytes(), 0, {}
        for length in sorted(length for length in lengths if length <= len(ids)):
            state.update(content[8 * done : 8 * length])
            called = f"{state.hexdigest()[:-_LENGTH_DIGITS]}{length:0{_LENGTH_DIGITS}x}"
            names[length], done = f"{self._space}{called[:2]}/{called}", length
        return names


def _lengths(names: Iterable[str]) -> set[int]:
    return {int(name[-_LENGTH_DIGITS:], 16) for name in names}


def _in_common(ids: Tensor, other: Tensor) -> int:
    tokens = min(len(ids), len(other))
    return int((ids[:tokens] == other[:tokens]).long().cumprod(0).sum())
