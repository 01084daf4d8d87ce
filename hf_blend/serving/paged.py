# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's paged cache, with blocks that hold blended K and V.

The engine shares a block by a hash of the prompt up to the block's end. Blended K and V also depend on which chunks
are where, and on how much of them is recomputed. So the hashes of blended blocks start at another root, made of these
things. A tenant's token ids are salted before they are hashed: the time of a first token tells nobody what another
tenant has asked.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

__all__ = ["BlendedPagedCache", "salted"]


def salted(token_ids: Sequence[int], salt: Sequence[int]) -> list[int]:
    """Return token ids of which the first are combined with the words of a salt."""
    return [*(token ^ word for token, word in zip(token_ids, salt, strict=False)), *token_ids[len(salt) :]]


class BlendedPagedCache(PagedAttentionCache):
    """A paged cache of full attention layers that knows which of its blocks are blended.

    Attributes:
        requests: the requests under way by name, as `BlendedPrefills` has them: their salts, how many tokens a prefill
            has filled, and the outcomes in which the tokens of an exact prefix are counted.
        shares: whether requests share blocks; False while the model that computes has no known author.
        blended: request → index of its first block with blended K and V.
        tails: hash of a prompt up to the end of its last chunk → request, and index of the block in which that ends.
    """

    def __init__(self, **settings: Any) -> None:
        """Make the cache, as in transformers."""
        super().__init__(**settings)
        self.requests: Mapping[str, Any] = {}
        self.shares = True
        self.blended: dict[str, int] = {}
        self.tails: dict[int, tuple[str, int]] = {}
        if list(self.cache_allocators) == ["full_attention"]:  # the engine refuses others
            self._keep_layers_together()

    def _keep_layers_together(self) -> None:
        """Store K and V layer by layer, not block by block: in consecutive blocks those of a layer are one slice."""
        allocator, page = self.allocator, self.page
        stored = allocator.cache_tensor
        by_layer = stored.view(len(allocator.layer_indices), 2, -1, *stored.shape[2:])
        allocator._kv_token_views = dict(zip(allocator.layer_indices, map(tuple, by_layer), strict=True))
        allocator._copy_view = by_layer.view(2 * len(by_layer), by_layer.shape[2] // page, -1).transpose(0, 1)
        allocator.block_physical_stride = page
        allocator.write_trash_index = page * allocator.blocks_per_sector

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Take blocks for tokens of a request, consecutive ones if possible; return False if too few are free."""
        if request_len > self.page and not dry_run:
            self._order_free_blocks(request_len // self.page // self.allocator.blocks_per_sector)
        return bool(super().can_store_request_tokens(state, request_len, dry_run))

    def _order_free_blocks(self, needed: int) -> None:
        """Order the free blocks: the next ones are of the shortest run that is long enough, else of the longest."""
        runs = list[list[int]]()
        for sector in sorted(self.pool.free_sectors):
            if runs and runs[-1][-1] + 1 == sector:
                runs[-1].append(sector)
            else:
                runs.append([sector])
        runs.sort(key=lambda run: (len(run) > needed, -len(run) if len(run) > needed else len(run)))
        self.pool.free_sectors[:] = [sector for run in runs for sector in reversed(run)]  # the last is taken first

    @property
    def allocator(self) -> Any:
        """The allocator of the full attention layers, which are all layers."""
        return self.cache_allocators["full_attention"]

    @property
    def blocks_in_use(self) -> int:
        """How many blocks requests hold; those that are kept for later requests are not counted."""
        pool, allocator = self.pool, self.allocator
        free = pool.num_free_sectors * allocator.blocks_per_sector + pool.count_free_blocks(allocator.index)
        return int(allocator.num_blocks - free - len(allocator.ledger.cached_blocks))

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Return how many first tokens of a prompt are in blocks: blended for this request, or of an exact prefix."""
        request = self.requests.get(request_id)
        if request is not None and request.filled_tokens:
            filled, request.filled_tokens = request.filled_tokens, 0
            return int(filled)
        if not self.shares:
            return 0
        matched = int(super().search_prefix_match(request_id, salted(prompt_ids, self._salt_of(request_id))))
        if request is not None:
            request.outcome.prefix_tokens = matched
        return matched

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Register the hashes of the blocks that a step has filled."""
        table = self.allocator.block_table.get(state.request_id)
        first = self.blended.get(state.request_id, -1)
        if not self.shares or not table or (first >= 0 and table[first] not in self.allocator.ledger.block_to_hash):
            return  # this block was not full when it was blended: no hash leads from it to others
        tokens = salted([*state.initial_tokens, *state.generated_tokens], self._salt_of(state.request_id))
        stand_in: Any = SimpleNamespace(
            request_id=state.request_id, status=state.status, initial_tokens=tokens, generated_tokens=[]
        )
        super().mark_complete_blocks(stand_in, complete_blocks)

    def _salt_of(self, request_id: str) -> Sequence[int]:
        request = self.requests.get(request_id)
        return () if request is None else request.reuse.salt

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Free a request's blocks."""
        self.blended.pop(request_id, None)
        self.tails = {tail: tail_row for tail, tail_row in self.tails.items() if tail_row[0] != request_id}
        super().free_blocks(request_id, no_cache)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Free the blocks of all requests."""
        self.blended.clear()
        self.tails.clear()
        super().free_all_requests(clear_ledgers)

    def count_exact(self, token_ids: Sequence[int]) -> int:
        """Return how many first tokens are in blocks that hold what a full prefill computes."""
        return len(self.allocator.match_prefix_blocks(list(token_ids))) * self.page

    def reserve(self, state: Any, tokens: int) -> bool:
        """Take blocks for the first tokens of a prompt that waits; return False if too few are free now."""
        self.pool.try_to_free_sectors()
        if self.can_store_request_tokens(state, tokens):
            return True
        if self.evict_cached_blocks():
            self.pool.try_to_free_sectors()
            return bool(self.can_store_request_tokens(state, tokens))
        return False

    def has_room(self, tokens: int, margin: float) -> bool:
        """Return whether blocks for so many tokens are free, and a share of `margin` of all blocks besides."""
        self.pool.try_to_free_sectors()
        needed = -(-tokens // self.page) * self.allocator.bytes_per_block
        return self.compute_free_capacity(relative=False) - needed >= margin * self.num_sectors * self.bytes_per_sector

    def blended_hashes(self, request_id: str) -> list[int]:
        """Return the hashes of a request's blocks with blended K and V, as far as they have any."""
        table, hashes = self.allocator.block_table.get(request_id, []), self.allocator.ledger.block_to_hash
        first = self.blended.get(request_id, len(table))
        return [hashes[block] for block in table[first:] if block in hashes]

    def discard(self, hashes: Iterable[int]) -> None:
        """Free the blocks of these hashes that no request holds."""
        ledger = self.allocator.ledger
        for block_hash in hashes:
            block = ledger.hash_to_block.get(block_hash)
            if block in ledger.cached_blocks:
                del ledger.cached_blocks[block], ledger.hash_to_block[block_hash], ledger.block_to_hash[block]
                self.pool.free_blocks(self.allocator.index, [block])

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer in all blocks, `[rows, kv_heads, head_dim]` each."""
        keys, values = self.allocator._kv_token_views[layer]
        return keys, values

    def rows_of(self, request_id: str, tokens: int) -> Tensor:
        """Return the rows of the first tokens of a request that has blocks for them, `[tokens]`."""
        return torch.tensor(self.allocator.get_write_indices(request_id, 0, tokens), device=self.device)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put K and V of a prompt's first tokens into a request's blocks.

        Shapes: keys `[kv_heads, tokens, head_dim]`, values `[kv_heads, tokens, head_dim]`.
        """
        self.allocator.update(keys.transpose(0, 1), values.transpose(0, 1), layer, rows[:0], rows)

    def register(self, request_id: str, token_ids: Sequence[int], exact: int, root: int, least: int) -> None:
        """Register the hashes of a blended request's full blocks; a block whose hash is known is replaced by that one.

        `token_ids` are the salted prompt, or empty if its blocks are not to be shared. The first chunk starts at token
        `exact`, before which K and V are those of a full prefill; the last chunk ends at token `least`. The hashes of
        the blended blocks start at `root`.
        """
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
        """Use the blended blocks of an earlier request with the same chunks; return how many first tokens they hold.

        They must hold all chunks, else 0. The arguments are those of `register`. The block in which the last chunk
        ends has another request's question behind it: it is copied, which works while that request is under way.
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
        """The number of tokens in a block."""
        return int(self.allocator.tokens_per_page)

    def _hashes(self, token_ids: Sequence[int], exact: int, root: int) -> list[int]:
        """Return the hash of each block: a chain as the engine's, started again at `root` with the first chunk."""
        parent, hashes = None, list[int]()
        for start in range(0, len(token_ids), self.page):
            begins_blended = start <= exact < start + self.page
            parent = compute_block_hash(root if begins_blended else parent, list(token_ids[start : start + self.page]))
            hashes.append(parent)
        return hashes
