# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Some faults of every class break no promise; without verification the same faults find wrong KV."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import faults
import pytest

from hf_blend.store import entry
from hf_blend.store.store import Store
from tests.conftest import slow_but
from tests.faults.fault import Verdict
from tests.faults.run import CLASSES, ROUND, Run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Run]:
    with Run(seed=1, folder=tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.mark.parametrize("name", CLASSES)
def test_no_promise_is_broken_by(name, run):
    """A few faults of each class; `make faults` injects more of them."""
    one = run.classes[name]
    one.run(6, "1")
    assert not one.outcome.broken, (one.outcome.kinds, one.outcome.examples)


def test_run_ends_with_report_of_what_was_found(tmp_path):
    with Run(seed=3, folder=tmp_path, only=["faulty-tier"]) as one:
        report = faults.until(one, 1, 0, 0, lambda line: None)
    assert report["faults"] == sum(report[verdict] for verdict in Verdict) >= ROUND
    assert report["broken"] == 0
    assert report["rounds"] == 1
    assert report["after"]["leaks"] == 0
    assert report["classes"]["faulty-tier"]["faults"] == report["faults"]


class _Agreeable(str):
    """A digest that equals every other."""

    __hash__ = str.__hash__
    __eq__ = lambda self, other: True  # noqa: E731
    __ne__ = lambda self, other: False  # noqa: E731


def without_digests(patch: pytest.MonkeyPatch) -> None:
    """Every digest of what was read is taken for right."""
    hasher = entry.tensor_digest

    def agreeable(data: bytes = b"") -> Any:
        real = hasher(data)
        hexdigest = lambda: _Agreeable(real.hexdigest())  # noqa: E731
        return SimpleNamespace(update=real.update, digest=real.digest, hexdigest=hexdigest)

    patch.setattr(entry, "tensor_digest", agreeable)


def without_one_reading(patch: pytest.MonkeyPatch) -> None:
    """What is written to the disk was not verified: it is what a server sends when it is asked once more."""
    promote = Store.promote

    def promote_unread(self: Store, chunk: Any, entry: Any) -> Any:
        if entry.content is not None:
            source = entry.tier.open(self.name(entry.key.digest))
            source.read_into(0, memoryview(entry.content))
        return promote(self, chunk, entry)

    patch.setattr(Store, "promote", promote_unread)


TAKEN_OUT: dict[str, tuple[set[str], Callable[[pytest.MonkeyPatch], None]]] = {  # who finds it; what takes it out
    "the digests": ({"files"}, without_digests),
    "the one reading of a server": ({"remote"}, without_one_reading),
}


@pytest.mark.parametrize("path", slow_but("the digests", among=TAKEN_OUT))
def test_one_round_of_faults_finds_wrong_kv_without(path, run, monkeypatch):
    """A round is 300 faults of all classes; the round ends with the class that finds it."""
    names, take_out = TAKEN_OUT[path]

    def wrong() -> int:
        return sum(run.classes[name].outcome.verdicts()["wrong"] for name in names)

    before = wrong()
    take_out(monkeypatch)
    run.round(1, stop=lambda: wrong() > before)
    assert wrong() > before, {name: run.classes[name].outcome.kinds for name in names}
