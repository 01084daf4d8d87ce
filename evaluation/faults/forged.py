# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Someone writes to the store who does not know its secret, or writes headers that no program would."""

import json
from dataclasses import replace

from hf_blend.store import ChunkStore
from hf_blend.store.tiers.base import BytesSource

from .base import FaultClass, content_of, name_of, tiny_chunk
from .memory import MemoryTier

SECRET = b"the store's own"
HOSTILE = (
    b"[" * 100_000,
    b'{"__metadata__":{}}',
    b"null",
    b'{"__metadata__":null}',
    b'{"token_ids":{"dtype":"I64","shape":[1099511627776],"data_offsets":[0,8796093022208]}}',
    b"\xff\xfe",
    b"{}",
)


class Forged(FaultClass):
    """Entries with KV of the attacker's choice under the right key, unsigned or signed with other secrets."""

    share = 0.04

    def inject(self, count: int) -> None:
        """Plant and ask."""
        tier = MemoryTier()
        signed, plain = ChunkStore([], [tier], secret=SECRET), ChunkStore([], [tier])
        for number in range(count):
            chunk = tiny_chunk(self.random.randrange(100))
            evil = replace(chunk, layers=tiny_chunk(self.random.randrange(100, 200)).layers)
            kind, content, asked = (
                ("unsigned", content_of(evil), signed),
                ("other secret", content_of(evil, self.random.randbytes(8)), signed),
                ("relabelled", content_of(evil).replace(b"sha256:", b"hmac-sha256:"), signed),
                ("hostile header", self._hostile(chunk), plain),
                ("changed header", self._changed(content_of(chunk)), plain),
            )[number % 5]
            tier.objects[name_of(chunk.key, SECRET if asked is signed else None)] = BytesSource(content)
            if self.expect(asked, chunk):
                self.outcome.wrong_kv += 1
            self.hit(kind)

    def _hostile(self, chunk: object) -> bytes:
        header = self.random.choice(HOSTILE)
        length = self.random.choice((len(header), 1 << 62, 0, 1 << 21))
        return length.to_bytes(8, "little") + header + bytes(64)

    def _changed(self, content: bytes) -> bytes:
        """Change one value somewhere in the JSON, and leave the rest as it was."""
        stop = 8 + int.from_bytes(content[:8], "little")
        rows = json.loads(content[8:stop])
        row = rows[self.random.choice([name for name in rows if name != "__metadata__"])]
        changes: tuple[dict, ...] = ({"shape": [-1]}, {"dtype": "F64"}, {"data_offsets": [0, 1 << 50]}, {"shape": []})
        row.update(self.random.choice(changes))
        header = json.dumps(rows, separators=(",", ":")).encode()
        header += b" " * (-(8 + len(header)) % 64)
        return len(header).to_bytes(8, "little") + header + content[stop:]
