# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One chunk as bytes: it comes back bit for bit, or it does not come back."""

import contextlib
import hashlib
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load

from hf_blend.errors import ConfigError, StoreError
from hf_blend.store import ChunkKey
from hf_blend.store.entry import HEADER_CAP_BYTES, KIND, EntryReader, Header, read_key
from hf_blend.store.tiers.base import EntryFault
from tests.asking import noting

from .conftest import header_of, reheaded, with_plan, with_text

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]


def with_header(content, change):
    """Change the JSON text of a header, and keep its length and its seal right: what is left is for the parser."""
    text = change(header_of(content)[8:].decode()).encode()
    return resealed(len(text).to_bytes(8, "little") + text) + content[len(header_of(content)) :]


def resealed(header):
    """The seal is the sha256 of a header without its seal; written here again, for the tests share no code."""
    begin, found, rest = re.match(rb'(?s)(.{8}.*?"seal":"|)(sha256:[0-9a-f]{64}|)(.*)', header).groups()
    digits = hashlib.sha256(b"hf_blend.seal\0" + begin + rest).hexdigest().encode()
    return begin + (b"sha256:" + digits if found else b"") + rest


def reason_of(source, content, key):
    with pytest.raises(EntryFault) as caught:
        EntryReader(source(content), key).read()
    return caught.value.reason


@pytest.fixture
def check_back(same, source, content):
    """A chunk is read from its bytes as it was written."""

    def check(stored):
        read = EntryReader(source(content(stored)), stored.key).read()
        same(read, stored)

    return check


def test_digest_of_key_is_that_of_written_down_encoding():
    def part(data):
        return len(data).to_bytes(8, "little") + data

    def ids(*values):
        return part(b"".join(value.to_bytes(8, "little") for value in values))

    text = part(b"hf_blend.key/1") + part(b"model") + part(b"ns") + ids(1, 2) + ids(3)
    assert ChunkKey("model", (1, 2), (3,), "ns").digest == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize("ids", [(1.5,), ("a",), (-1,), (2**31,), ()])
def test_key_takes_ids_from_tensors_and_lists_and_refuses_what_is_no_token(ids):
    with pytest.raises(ConfigError, match="token"):
        ChunkKey("f", (), ids)
    assert ChunkKey("f", [], torch.tensor([3, 4])) == ChunkKey("f", (), (3, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunk_comes_back_bit_for_bit(chunk, check_back, dtype):
    check_back(chunk(dtype=dtype))


def test_read_takes_narrow_values_before_wide_type_and_absurd_but_empty_shapes(chunk, check_back, source, content):
    mixed = chunk((5,))
    (keys, values), second = mixed.layers
    narrow = values[:1, :, :1].to(torch.float8_e5m2)
    check_back(replace(mixed, layers=((keys, narrow), second)))
    stored = chunk()
    shape = (0, 3, 1 << 39)
    empty = {"shape": shape, "digest": "99aa06d3014798d86001c324468d497f"}
    bad = reheaded(content(stored), lambda header: with_plan(header, -1, **empty))
    _, last_values = stored.layers[1]
    found = EntryReader(source(bad[: -last_values.nbytes]), stored.key).read()
    assert found.layers[1][1].shape == shape


def test_entry_is_aligned_safetensors_without_text_of_user(chunk, content):
    stored = chunk(dtype=torch.bfloat16)
    tensors = load(content(stored))
    assert tensors["token_ids"].tolist() == list(stored.key.token_ids)
    assert tensors["chunk_prefix_ids"].tolist() == list(stored.key.chunk_prefix_ids)
    assert tensors["layer.1.v"].equal(stored.layers[1][1])
    assert len(tensors) == 9
    assert tensors["importance"].tolist() == [*stored.importance.tolist(), 0.0]
    plain = content(chunk())
    assert content(chunk()) == plain
    assert len(header_of(plain)) % 64 == 0
    rows = json.loads(header_of(content(chunk(layers=2)))[8:])
    del rows["__metadata__"]
    names = "token_ids chunk_prefix_ids importance table.0.cos table.0.sin layer.0.k layer.0.v layer.1.k layer.1.v"
    assert " ".join(rows) == names
    end = 0
    for row in rows.values():
        start, stop = row["data_offsets"]
        assert start == end
        end = stop


def test_damage_is_found_before_its_layer_is_used(chunk, source, content):
    stored = chunk(layers=2)
    bad = bytearray(content(stored))
    bad[-1] ^= 1  # values of the last layer
    reader = EntryReader(source(bytes(bad)), stored.key)
    assert reader.layers(0)[0][0].equal(stored.layers[0][0])
    with pytest.raises(EntryFault, match="digest"):
        reader.layers(1)
    stored = chunk((5, 6), layers=1)
    good = content(stored)
    reasons = {reason_of(source, good[:length], stored.key) for length in range(len(good))}
    assert reasons == {"truncated"}
    assert reason_of(source, good + b"\0", stored.key) == "format"


def test_renamed_tensors_are_found_even_with_fresh_manifest(chunk, source, content):
    stored = chunk(layers=2)
    good = content(stored)
    renamed = with_header(good, lambda text: text.replace("layer.0.k", "layer.2.k"))
    assert reason_of(source, renamed, stored.key) == "format"

    def swapped(header):
        names = [plan.name for plan in header.tensors]
        names.insert(5, names.pop(7))
        plans = []
        for plan, name in zip(header.tensors, names, strict=True):
            plans.append(replace(plan, name=name))
        return replace(header, tensors=tuple(plans))

    assert reason_of(source, reheaded(good, swapped), stored.key) == "format"


def metadata(**changes):
    def change(text):
        rows = json.loads(text)
        for name, value in changes.items():
            rows["__metadata__"][name] = value
        return json.dumps(rows, separators=(",", ":"))

    return change


HOSTILE = {
    "no JSON": lambda text: "{",
    "deep nesting": lambda text: "[" * 200_000,
    "a table beyond all numbers": metadata(layer_table="[1e999]"),
    "a codec that is a number": metadata(codec=5),
    "a lost digest": metadata(digests="[]"),
}
REPLACED = {  # once, in the text of a header
    '"chunk_prefix_ids"': '"token_ids"',
    "[3]": "[-3]",
    "[3],": "[4611686018427387904],",
    '"I64"': '"I65"',
    ",": ", ",
    "table.0.cos": r"\ud800",
    "hf_blend.chunk/2": "hf_blend.chunk/3",
}


def test_entry_without_importance_is_read_and_one_of_other_numbers_is_refused(chunk, check_back, source, content):
    stored = chunk((5, 6, 7, 8, 9))
    check_back(replace(stored, importance=None, question=""))
    for other in ([1, 1, 1, 1], [1, torch.nan, 1, 1, 1], [1, -1, 1, 1, 1]):
        wrong = replace(stored, importance=torch.tensor(other).half())
        with pytest.raises(StoreError, match="importance of chunk"):
            wrong.check()
        assert reason_of(source, content(wrong), stored.key) == "format"
    assert reason_of(source, content(replace(stored, importance=torch.ones(5))), stored.key) == "format"
    _, (keys, _) = EntryReader(source(content(stored)), stored.key).layers(0, 10**6)
    assert keys.data_ptr() % keys.itemsize == 0


def test_header_sealed_by_tests_is_read(chunk, same, source, content):
    stored = chunk()
    same(EntryReader(source(with_header(content(stored), lambda text: text)), stored.key).read(), stored)
    with pytest.raises(EntryFault, match="not what its content says"):  # and not: the seal does not fit
        EntryReader(source(with_header(content(stored), metadata(canary="x"))), stored.key)


def test_hostile_header_is_refused_and_gives_no_wrong_key(chunk, source, content):
    stored = chunk()
    changes = dict(HOSTILE)
    for old, new in REPLACED.items():
        changes[new] = lambda text, old=old, new=new: text.replace(old, new, 1)
    for name, change in changes.items():
        bad = with_header(content(stored), change)
        assert reason_of(source, bad, stored.key) in ("format", "kind"), name
        with contextlib.suppress(EntryFault):
            assert read_key(source(bad), "") == stored.key, name
    for length in (HEADER_CAP_BYTES + 1, 2**63, 2**64 - 1):
        bad = length.to_bytes(8, "little") + content(stored)[8:]
        assert reason_of(source, bad, stored.key) == "format"


@pytest.mark.parametrize("texts", [{"layer_table": "[0,7]"}, {"layer_table": "[0,-2]"}, {"provenance": "live"}])
def test_header_of_no_isolated_chunk_is_refused(texts, chunk, source, content):
    stored = chunk()
    bad = reheaded(content(stored), lambda header: with_text(header, **texts))
    assert reason_of(source, bad, stored.key) == "format"


def test_key_of_absurdly_many_ids_is_refused_before_memory_is_taken(chunk, content):
    stored = chunk((5,))
    good = Header.decode(header_of(content(stored)), KIND)

    header = with_plan(good, 0, shape=(1 << 39,))
    head = header.encode()

    def read_into(start, target):
        stop = start + len(target)
        target[:] = (head + bytes(stop))[start:stop]

    endless = SimpleNamespace(stat=SimpleNamespace(nbytes=len(head) + header.nbytes), read_into=read_into)
    with pytest.raises(EntryFault, match="are not those of a chunk"):
        read_key(endless, "")


def test_key_is_read_without_kv(chunk, source, content):
    stored = chunk(namespace="n")
    assert read_key(source(content(stored)), "n") == stored.key
    with pytest.raises(EntryFault) as caught:
        read_key(source(content(stored)), "other")
    assert caught.value.reason == "namespace"
    assert not caught.value.corrupt


def test_read_key_checks_ids(chunk, source, content):
    stored = chunk((5, 6, 7))
    other = chunk((5, 6, 8))
    mislabelled = reheaded(content(stored), lambda header: with_text(header, key=other.key.digest))
    with pytest.raises(EntryFault, match="key"):
        read_key(source(mislabelled), "")
    good = content(stored)
    for value in (8, -1, 2**40):
        other_ids = bytearray(good)
        start = len(header_of(good))
        other_ids[start : start + 8] = value.to_bytes(8, "little", signed=True)
        with pytest.raises(EntryFault, match="key"):
            read_key(source(bytes(other_ids)), "")


def test_chunk_that_could_not_be_read_back_is_not_written(chunk, content):
    with pytest.raises(StoreError, match=r"\d+ tensors are too many"):
        content(chunk((5,), layers=5000))
    with pytest.raises(StoreError, match="complex64"):
        content(chunk().map(lambda tensor: tensor.to(torch.complex64)))


def test_seal_is_compared_before_anything_is_parsed(chunk, source, content, monkeypatch):
    stored = chunk()
    parsed = []
    noting(monkeypatch, json, "loads", parsed.append)
    for position in (20, 60, 150, 300):
        bad = bytearray(content(stored))
        bad[position] ^= 1
        assert reason_of(source, bytes(bad), stored.key) in ("format", "kind")
        with pytest.raises(EntryFault, match=r"format|kind"):
            read_key(source(bytes(bad)), "")
    assert parsed == []
