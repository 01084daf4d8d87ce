# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier on another machine whose server is gone, hangs or forgets, and a store of which it is the only tier."""

from hf_blend.store import ChunkStore

from .fault import FaultClass, Verdict
from .server import LOST, FaultyServer
from .world import drawn_chunk

HARMLESS = ("gone", "hangs")  # what was stored before is there afterwards
CHUNKS = 4
OPERATIONS = 12


class LostServer(FaultClass):
    """Every use of the store while the server is lost counts as one fault."""

    share = 0.03

    def inject(self, count: int) -> None:
        """Store while all is well, use while it is not, and look afterwards."""
        chunks = [drawn_chunk(number) for number in range(CHUNKS)]
        for _ in range(-(-count // OPERATIONS)):
            way, objects = self.random.choice(LOST), dict[str, bytes]()
            with ChunkStore([], [FaultyServer(objects)]) as before:
                for chunk in chunks[1:]:
                    before.put(chunk)
            lost = ChunkStore([], [FaultyServer(objects, way)])
            for _ in range(OPERATIONS):
                chunk = self.random.choice(chunks)
                if self.random.random() < 0.3:
                    self.judge(way, lambda: Verdict.MISS if lost.put(chunk) else Verdict.WRONG)  # noqa: B023
                else:
                    self.judge(way, lambda: self.expect(lost, chunk))  # noqa: B023
            if way in HARMLESS:
                after = ChunkStore([], [FaultyServer(objects)])
                for chunk in chunks[1:]:
                    verdict = self.find(after, chunk)
                    if verdict is not Verdict.RIGHT:
                        self.note(way, verdict, "looked for after the server came back")
