# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""kill -9 at a random instant of puts, evictions, deletions and saving the index."""

import os
import signal
import time
from collections.abc import Callable

from .killing import Killing, read_numbers
from .world import drawn_chunk

__all__ = ["RandomKills"]


class RandomKills(Killing):
    """The child stores chunk after chunk; half of the time in a store with room for a few only."""

    kill_share = 0.45

    def kill_one(self, capped: bool) -> list[int]:
        """Kill after some acknowledgements, or none, and a few milliseconds."""
        first = self.outcome.kills * 1000

        def act(tell: Callable[[int], None]) -> None:
            with self.opened(capped) as store:
                for number in range(first + 1, first + 1000):
                    store.put(drawn_chunk(number))
                    tell(number)
                    if number % 5 == 0:
                        store.put(drawn_chunk(number + 500))
                        store.delete(drawn_chunk(number + 500).key)
                        store.close()

        child, pipe = self.fork(act)
        waited = self.random.choice((0, 1, 2, 6))
        told = b"".join(os.read(pipe, 4) for _ in range(waited))
        time.sleep(self.random.uniform(0, 0.004))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [int.from_bytes(told[at : at + 4], "little") for at in range(0, 4 * waited, 4)] + read_numbers(pipe)
