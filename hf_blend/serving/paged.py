# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's paged cache, with blocks that hold blended K and V.

The engine shares a block by a hash over the tokens of its prompt so far. Blended K and V depend on more: which chunks
stood where, and how much of them was recomputed. So the hashes of blended blocks begin at another root, made of these
things. A tenant's hashes are salted, so that nobody learns from a first token's time what another has asked.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

__all__ = ["BlendedPagedCache", "salted"]


def salted(token_ids: Sequence[int], salt: Sequence[int]) -> list[int]:
    """Token ids of which the first are changed by a salt."""
    return [*(token ^ word for token, word in zip(token_ids, salt, strict=False)), *token_ids[len(salt) :]]


class BlendedPagedCache(PagedAttentionCache):
    """A stock paged cache of full attention layers that knows what in it was blended.

    Attributes:
        requests: of each that is under way, the salt of its tokens and a `Prefilled`, which is told how many of its
            first tokens were an exact prefix.
        ready: how many first tokens of a prompt are in its blocks, for the scheduler to find.
        shares: whether blocks are shared between requests; not while nobody can say who computes them.
        blended: of each request that was, its first block with blended K and V.
        tails: what is in a block up to the end of the last chunk, hashed → request, block.
    """

    def __init__(self, **settings: Any) -> None:
        """As in transformers."""
        super().__init__(**settings)
        self.requests: dict[str, tuple[Sequence[int], Any]] = {}
        self.ready: dict[str, int] = {}
        self.shares = True
        self.blended: dict[str, int] = {}
        self.tails: dict[int, tuple[str, int]] = {}
        if list(self.cache_allocators) == ["full_attention"]:  # the engine refuses others
            self._keep_layers_together()

    def _keep_layers_together(self) -> None:
        """Order K, and V, by layers, not by blocks: those of a layer in blocks that are in a row are then a slice."""
        allocator, page = self.allocator, self.page
        stored = allocator.cache_tensor
        by_layer = stored.view(len(allocator.layer_indices), 2, -1, *stored.shape[2:])
        allocator._kv_token_views = dict(zip(allocator.layer_indices, map(tuple, by_layer), strict=True))
        allocator._copy_view = by_layer.view(2 * len(by_layer), by_layer.shape[2] // page, -1).transpose(0, 1)
        allocator.block_physical_stride = page
        allocator.write_trash_index = page * allocator.blocks_per_sector

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Take blocks for tokens of a request, in a row if there are such; return False where too few are free."""
        if request_len > self.page and not dry_run:
            self._put_in_row(request_len // self.page // self.allocator.blocks_per_sector)
        return bool(super().can_store_request_tokens(state, request_len, dry_run))

    def _put_in_row(self, needed: int) -> None:
        """Order what is free: the next taken are of the shortest row that is long enough, or of the longest ones."""
        rows = list[list[int]]()
        for sector in sorted(self.pool.free_sectors):
            if rows and rows[-1][-1] + 1 == sector:
                rows[-1].append(sector)
            else:
                rows.append([sector])
        rows.sort(key=lambda row: (len(row) > needed, -len(row) if len(row) > needed else len(row)))
        self.pool.free_sectors[:] = [sector for row in rows for sector in reversed(row)]  # the last is taken first

    @property
    def allocator(self) -> Any:
        """Of the full attention layers, which are all layers."""
        return self.cache_allocators["full_attention"]

    @property
    def blocks_in_use(self) -> int:
        """Blocks that a request holds; those kept for later requests are not counted."""
        pool, allocator = self.pool, self.allocator
        free = pool.num_free_sectors * allocator.blocks_per_sector + pool.count_free_blocks(allocator.index)
        return int(allocator.num_blocks - free - len(allocator.ledger.cached_blocks))

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """How many of a prompt's first tokens are there: blended for this request, or of an exact prefix."""
        if ready := self.ready.pop(request_id, 0):
            return ready
        if not self.shares:
            return 0
        salt, outcome = self.requests.get(request_id, ((), None))
        matched = int(super().search_prefix_match(request_id, salted(prompt_ids, salt)))
        if outcome is not None:
            outcome.prefix_tokens = matched
        return matched

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Register the hashes of the blocks that a step has filled."""
        table = self.allocator.block_table.get(state.request_id)
        first = self.blended.get(state.request_id, -1)
        if not self.shares or not table or (first >= 0 and table[first] not in self.allocator.ledger.block_to_hash):
            return  # this block was not full when it was blended: no hash leads from it to others
        salt, _ = self.requests.get(state.request_id, ((), None))
        tokens = salted([*state.initial_tokens, *state.generated_tokens], salt)
        stand_in: Any = SimpleNamespace(
            request_id=state.request_id, status=state.status, initial_tokens=tokens, generated_tokens=[]
        )
        super().mark_complete_blocks(stand_in, complete_blocks)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Let go of a request's blocks."""
        self.blended.pop(request_id, None)
        self.tails = {tail: tail_row for tail, tail_row in self.tails.items() if tail_row[0] != request_id}
        super().free_blocks(request_id, no_cache)

    def forget(self, request_id: str) -> None:
        """A request is over: forget what was told of it."""
        self.requests.pop(request_id, None)
        self.ready.pop(request_id, None)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Let go of the blocks of all requests."""
        for table in (self.requests, self.ready, self.blended, self.tails):
            table.clear()
        super().free_all_requests(clear_ledgers)

    def count_exact(self, token_ids: Sequence[int]) -> int:
        """How many first tokens are in blocks that hold what a full prefill computes."""
        return len(self.allocator.match_prefix_blocks(list(token_ids))) * self.page

    def reserve(self, state: Any, tokens: int) -> bool:
        """Take blocks for the first tokens of a prompt that waits; False where there are none now."""
        self.pool.try_to_free_sectors()
        if self.can_store_request_tokens(state, tokens):
            return True
        if self.evict_cached_blocks():
            self.pool.try_to_free_sectors()
            return bool(self.can_store_request_tokens(state, tokens))
        return False

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer in all blocks, `[rows, kv_heads, head_dim]` each."""
        keys, values = self.allocator._kv_token_views[layer]
        return keys, values

    def rows_of(self, request_id: str, tokens: int) -> Tensor:
        """Where the first tokens of a request that has blocks for them are kept, `[tokens]`."""
        return torch.tensor(self.allocator.get_write_indices(request_id, 0, tokens), device=self.device)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put K and V of a prompt's first tokens into a request's blocks.

        Shapes: keys `[kv_heads, tokens, head_dim]`, values `[kv_heads, tokens, head_dim]`.
        """
        self.allocator.update(keys.transpose(0, 1), values.transpose(0, 1), layer, rows[:0], rows)

    def register(self, request_id: str, token_ids: Sequence[int], exact: int, root: int, least: int) -> None:
        """Give a blended request's full blocks their hashes; one that is there already takes the place of its twin."""
        self.blended[request_id] = exact // self.page
        ledger, table = self.allocator.ledger, self.allocator.block_table[request_id]
        for index, block_hash in enumerate(self._hashes(token_ids, exact, root)[: len(token_ids) // self.page]):
            twin = ledger.register_new_hash(table[index], block_hash)
            if twin is not None:
                ledger.acquire(twin)
                block, table[index] = table[index], twin
                if ledger.release(block):
                    self.pool.free_blocks(self.allocator.index, [block])
        if token_ids:
            self.tails[self._hashes(token_ids[:least], exact, root)[-1]] = request_id, (least - 1) // self.page

    def share_blended(self, state: Any, token_ids: Sequence[int], exact: int, root: int, least: int) -> int:
        """Use the blended blocks of an earlier request with the same chunks, if they reach far enough.

        The block in which the last chunk ends is another's as a rule: questions differ. It is copied while the request
        that has it is there.
        """
        allocator, blocks = self.allocator, list[int]()
        for block_hash in self._hashes(token_ids, exact, root)[: len(token_ids) // self.page]:
            block = allocator.ledger.hash_to_block.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        full, tokens = least // self.page, len(blocks) * self.page
        tail = self._hashes(token_ids[:least], exact, root)[-1]
        if tokens >= least:
            allocator.acquire_prefix_blocks(state.request_id, tokens, blocks)
        elif len(blocks) == full and tail in self.tails:
            allocator.acquire_prefix_blocks(state.request_id, tokens, blocks)
            if not self.reserve(state, least):
                super().free_blocks(state.request_id)
                return 0
            owner, index = self.tails[tail]
            allocator.copy_blocks(
                [allocator.block_table[owner][index]], allocator.block_table[state.request_id][full:]
            )
            self.tails[tail], tokens = (state.request_id, full), least
        else:
            return 0
        self.blended[state.request_id] = exact // self.page
        return tokens

    @property
    def page(self) -> int:
        """How many tokens a block has."""
        return int(self.allocator.tokens_per_page)

    def _hashes(self, token_ids: Sequence[int], exact: int, root: int) -> list[int]:
        """The hash of each block: a chain as the engine's, which restarts at the root where blending begins."""
        parent, hashes = None, list[int]()
        for start in range(0, len(token_ids), self.page):
            begins_blended = start <= exact < start + self.page
            parent = compute_block_hash(root if begins_blended else parent, list(token_ids[start : start + self.page]))
            hashes.append(parent)
        return hashes
