# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The file of an image's chunk is damaged; the chunk is asked for in every way that requests ask."""

from functools import cached_property
from typing import Any

import torch

from hf_blend import BlendCache
from hf_blend.prompt.content import is_content
from hf_blend.store import ChunkKV, ChunkStore

from ..image_models import CHUNKS, FLOOR, arguments, build, gap, picture, stock
from .damage import clear, damaged
from .fault import FaultClass
from .files import asked
from .world import WAYS, Entry, ModelCache

KIND = "llava"
SEEDS = range(4)  # of the images


class ImageChunks(FaultClass):
    """Images of one size, so that each could be taken for another."""

    share = 0.01

    def inject(self, count: int) -> None:
        """Damage, ask, and put back."""
        for _ in range(count):
            shelf, way = self._shelf, self.random.choice(WAYS)
            place = self.random.randrange(len(shelf.entries))
            entry, other = shelf.entries[place], shelf.other(self.random, place)
            kind, bad = damaged(self.random, entry.good, other.good)
            entry.path.write_bytes(bad)
            self.outcome.paths[way] += 1
            self.judge(kind, lambda: asked(shelf, entry, way, self.random))  # noqa: B023
            shelf.put_back(place)

    @cached_property
    def _shelf(self) -> ModelCache:
        """The chunks of the images alone; what is blended from them is what the stock model computes."""
        folder, settings = self.folder / "images", {"memory_bytes": 0}
        shelf = ModelCache(folder, settings, ChunkStore.open(folder, durability="none", **settings))
        kept, put = list[ChunkKV](), shelf.store.put
        vars(shelf.store)["put"] = lambda chunk: (kept.append(chunk), put(chunk))[1]
        for seed in SEEDS:
            self._request(shelf.store, seed)
        del vars(shelf.store)["put"]
        for chunk in kept:
            if is_content(chunk.key.token_ids[0]):
                (path,) = (folder / "objects").rglob(f"*{chunk.key.digest}*")
                got = shelf.store.get(chunk.key)
                assert got is not None, "nothing was damaged yet, and nothing was found"
                entry = Entry(chunk, got, path, path.read_bytes())
                shelf.entries.append(entry)
        assert len(shelf.entries) >= len(SEEDS), "an image has an entry of its features and one of its K and V"
        for path in (folder / "incoming").glob("*"):
            clear(path)
        return shelf

    @torch.no_grad()
    def _request(self, store: ChunkStore, seed: int) -> None:
        inputs, model = arguments(KIND, CHUNKS[0], picture(KIND), CHUNKS[1], seeds=(seed,)), build(KIND)
        cache = BlendCache(model, store, recompute_ratio=1.0)
        given: Any = cache.inputs_with_images(**inputs)
        got = model(**given, past_key_values=cache, logits_to_keep=1, use_cache=True).logits[:, -1]
        assert gap(got, stock(KIND, inputs)[0]) < FLOOR, "not what the stock model computes"
