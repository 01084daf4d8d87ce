# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Someone may write to the folder of a signed store, and knows all but its secret."""

import hashlib
from dataclasses import replace

from .damage import body_of, header_of, tensors_of
from .fault import FaultClass
from .files import asked
from .world import WAYS, Entry

ATTACKER = b"x"
SHELVES = ("signed", "signed int8")
KINDS = ("unsigned", "other secret", "relabelled", "digests mended", "signature of another")


class Signed(FaultClass):
    """Entries under the right key, whole in themselves, with KV of the attacker's choice."""

    share = 0.06

    def setup(self) -> None:
        """What the attacker wants to be believed is written when it is first planted."""
        self._forged: dict[tuple[str, int], dict[str, bytes]] = {}

    def inject(self, count: int) -> None:
        """Plant and ask."""
        for _ in range(count):
            name, kind, way = (self.random.choice(one) for one in (SHELVES, KINDS, WAYS))
            shelf = self.world.shelves[name]
            place = self.random.randrange(len(shelf.entries))
            entry = shelf.entries[place]
            if (name, place) not in self._forged:
                self._forged[name, place] = self._forgeries(name, entry)
            entry.path.write_bytes(
                self._mended(entry) if kind == "digests mended" else self._forged[name, place][kind]
            )
            self.outcome.paths[name] += 1
            self.outcome.paths[way] += 1
            self.judge(kind, lambda: asked(shelf, entry, way, self.random))  # noqa: B023
            shelf.put_back(place)

    def _forgeries(self, name: str, entry: Entry) -> dict[str, bytes]:
        turned = tuple((-keys, values.flip(1)) for keys, values in entry.computed.layers)
        evil = replace(entry.computed, layers=turned)
        unsigned, other = (self.world.written(name, evil, secret=secret) for secret in (None, ATTACKER))
        header, body = (part(unsigned) for part in (header_of, body_of))
        relabelled = header.replace(b"sha256:", b"hmac-sha256:").rstrip(b" ")
        relabelled += b" " * (-(8 + len(relabelled)) % 64)
        return {
            "unsigned": unsigned,
            "other secret": other,
            "relabelled": len(relabelled).to_bytes(8, "little") + relabelled + body,
            "signature of another": entry.good[: -len(body_of(entry.good))] + body_of(other),
        }

    def _mended(self, entry: Entry) -> bytes:
        """Another value in one tensor, with the digest that then is right; the signature stays as it was."""
        bad, digest = bytearray(entry.good), lambda content: hashlib.sha256(content).hexdigest().encode()
        start, stop = self.random.choice([one for name, one in tensors_of(entry.good).items() if "layer" in name])
        before = digest(bad[start:stop])
        bad[self.random.randrange(start, stop)] ^= 0x40
        assert entry.good.count(before) == 1, "a signed entry holds the sha256 of each tensor once"
        return bytes(bad).replace(before, digest(bad[start:stop]))
