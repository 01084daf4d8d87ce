# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Retrieval by meaning: a piece in other words is found, and its vectors are computed once, never mixed, removed."""

import json
import logging
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from hf_blend import ChunkStore
from hf_blend.errors import ConfigError, MissingExtraError
from hf_blend.evaluation.demo.model_cache import ModelCache
from hf_blend.evaluation.demo.request import DemoRequest, prepare
from hf_blend.evaluation.demo.visitors import Limits
from hf_blend.evaluation.documents import Document
from hf_blend.evaluation.meaning import Encoder, Meaning, digest_of
from hf_blend.evaluation.retrieving import Piece, Retriever, fuse
from hf_blend.evaluation.sources import Source, Sources
from tests.asking import raising
from tests.saved_models import save_tokenizer_of_bytes

MEANINGS = {"warm": 0, "temperature": 0, "boat": 1, "ship": 1, "light": 2, "lamp": 2, "mill": 3, "keeps": 4}
TEXTS = {"a.txt": "the mill", "b.txt": "how warm it is", "c.txt": "a boat", "d.txt": "the lamp"}
PIECES = [Piece(name, 0, text, (1,)) for name, text in TEXTS.items()]


class FakeEncoder:
    """Counts meanings of words; a stand-in that needs no library."""

    width = 5

    def __init__(self, identity="1" * 32):
        self.identity, self.embedded = identity, []

    def embed(self, texts, watch=iter):
        self.embedded += texts
        return {digest_of(text): self.embed_question(text)[None] for text in texts}

    def embed_question(self, text):
        vector = np.zeros(self.width, dtype=np.float32)
        for word in text.lower().replace("?", "").replace(",", "").split():
            if word in MEANINGS:
                vector[MEANINGS[word]] += 1
        return vector


def test_fuse_adds_reciprocal_ranks_and_takes_what_one_ranking_has_alone():
    assert fuse([3, 1, 2], [1, 3]) == [3, 1, 2]
    assert fuse([3, 1, 2], [1]) == [1, 3, 2]
    assert fuse([], [2, 0]) == [2, 0]


def test_a_piece_in_other_words_is_found_by_meaning_and_words_still_count():
    retriever = Retriever(PIECES, 2, Meaning(FakeEncoder(), PIECES))
    assert retriever.rank("temperature?")[0].name == "b.txt"
    assert [piece.name for piece in retriever.rank("Ship, mill?")] == ["a.txt", "c.txt"]
    assert retriever.knows("Xyzzy?"), "nothing is called unknown"
    assert Retriever(PIECES, 2).rank("temperature?") == PIECES[:2]


def test_the_best_part_of_a_piece_counts():
    encoder = FakeEncoder()
    encoder.embed = lambda texts, watch=iter: {
        digest_of(text): np.stack([encoder.embed_question(word) for word in text.split()]) for text in texts
    }
    pieces = [Piece("a", 0, "boat boat light boat", (1,)), Piece("b", 0, "mill light", (1,)), PIECES[1]]
    assert Meaning(encoder, pieces).rank("ship lamp keeps")[0] in (0, 1)
    assert Meaning(encoder, pieces).rank("mill") == [1, 0, 2]


@pytest.fixture
def kv(tmp_path):
    with ChunkStore.open(tmp_path / "kv") as opened:
        yield opened


def computed(store, pieces=PIECES, **settings):
    """The texts that are embedded for some pieces, by a new process."""
    encoder = FakeEncoder(**settings)
    assert Meaning(encoder, pieces, store).vectors.keys() == {digest_of(piece.text) for piece in pieces}
    return encoder.embedded


def files(store):
    return sorted((store.tiers()[-1].root / "vectors").rglob("*.safetensors"))


def test_vectors_are_computed_once_and_again_where_the_text_changed(kv):
    assert computed(kv) == list(TEXTS.values())
    assert computed(kv) == []
    changed = [Piece("a.txt", 0, "a keeps mill", (1,)), *PIECES[1:]]
    assert computed(kv, changed) == ["a keeps mill"]
    assert len(files(kv)) == len(TEXTS)
    assert computed(kv) == ["the mill"], "what a document no longer holds is not kept"


def test_another_encoder_and_another_namespace_find_nothing_of_these_vectors(kv, tmp_path):
    computed(kv)
    assert computed(kv, identity="2" * 32) == list(TEXTS.values())
    assert computed(kv) == []
    with ChunkStore.open(tmp_path / "kv", namespace="other") as other:
        assert computed(other) == list(TEXTS.values())


@pytest.mark.parametrize("content", [b"", b"no tensors", "cut", "narrow", "nan", "long"])
def test_damaged_vectors_are_computed_again(kv, content):
    from safetensors.numpy import load, save

    computed(kv)
    path = next(path for path in files(kv) if digest_of("a boat") in load(path.read_bytes()))
    if content == "cut":
        content = path.read_bytes()[:-4]
    elif isinstance(content, str):
        rows = {"narrow": np.ones((1, 3)) / 2, "nan": np.full((1, 5), np.nan), "long": np.full((1, 5), 1e30)}[content]
        content = save({digest_of("a boat"): rows.astype(np.float32)})
    path.write_bytes(content)
    assert computed(kv) == ["a boat"]
    assert computed(kv) == []


def test_vectors_go_with_their_document_and_memory_keeps_none(kv):
    source = Source("b.txt", "", "mine", "f" * 64, 512, 1.0, ("1" * 64,))
    Sources(kv).add([source])
    computed(kv)
    Sources(kv).remove([source])
    assert computed(kv) == ["how warm it is"]
    with ChunkStore.open("memory://") as bare:
        assert computed(bare) == list(TEXTS.values())
        assert computed(bare) == list(TEXTS.values())


@pytest.mark.parametrize("command", [["ask", "Who?", "absent.txt"], ["index", "absent.txt"], ["chat", "absent.txt"]])
def test_a_missing_extra_is_said_before_anything_is_read(command, here, run, monkeypatch):
    error = MissingExtraError('retrieval by meaning needs x: pip install "hf-blend[meaning]"')
    monkeypatch.setattr("hf_blend.evaluation.meaning.import_extra", raising(error))
    code, _, err = run(*command, "--meaning", "owner/encoder")
    assert (code, 'pip install "hf-blend[meaning]"' in err, "absent.txt" in err) == (2, True, False)


def test_a_refusal_comes_without_the_line_of_a_library_about_a_kernel(here, run, monkeypatch, caplog):
    def absent(*_, **__):
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward")
        raise MissingExtraError("absent")

    monkeypatch.setattr("hf_blend.evaluation.meaning.import_extra", absent)
    assert run("ask", "Who?", "absent.txt", "--meaning", "owner/encoder") == (2, "", "hf-blend: absent\n")
    assert not caplog.records


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip(
        "sentence_transformers", reason="the extra meaning is not installed: pip install hf-blend[meaning]"
    )


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory, library):
    """A static encoder of eight words, of which some mean the same."""
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = Tokenizer(
        models.WordLevel({"[UNK]": 0, **{word: id + 1 for id, word in enumerate(MEANINGS)}}, "[UNK]")
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    weights = np.zeros((len(MEANINGS) + 1, 5), dtype=np.float32)
    for row, meaning in enumerate(MEANINGS.values(), 1):
        weights[row, meaning] = 1
    path = tmp_path_factory.mktemp("encoder")
    library.SentenceTransformer(modules=[StaticEmbedding(tokenizer, weights)], device="cpu").save(str(path))
    return path


def test_an_encoder_embeds_in_unit_vectors_and_remembers(encoder_folder, monkeypatch):
    encoder = Encoder(str(encoder_folder), "cpu")
    vectors = encoder.embed(["warm boat", "warm boat", "xyzzy"])
    assert vectors[digest_of("warm boat")].tolist() == [pytest.approx([0.5**0.5, 0.5**0.5, 0, 0, 0])]
    assert np.isfinite(vectors[digest_of("xyzzy")]).all()
    assert encoder.embed_question("Temperature?").tolist() == pytest.approx([1, 0, 0, 0, 0])
    assert encoder.width == 5
    monkeypatch.setattr(encoder, "_encode", None)
    assert encoder.embed(["warm boat"]).keys() == {digest_of("warm boat")}
    monkeypatch.setattr("hf_blend.evaluation.meaning.MOST_KEPT", 1)
    encoder.embed([])
    assert len(encoder._kept) == 1


def test_an_encoder_is_another_when_any_of_its_weights_is(encoder_folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    copy = shutil.copytree(encoder_folder, tmp_path / "copy")
    first = Encoder(str(encoder_folder), "cpu").identity
    (copy / "README.md").write_text("another text")
    assert Encoder(str(copy), "cpu").identity == first
    path = next(copy.rglob("model.safetensors"))
    weights = load_file(path)
    save_file({name: 2 * rows for name, rows in weights.items()}, path)
    assert Encoder(str(copy), "cpu").identity != first


def test_an_encoder_divides_what_is_longer_than_it_reads(library, tmp_path):
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=16, max_position_embeddings=64)).save_pretrained(tmp_path / "bert")
    save_tokenizer_of_bytes(tmp_path / "bert")
    bert = Transformer(str(tmp_path / "bert"))
    bert.tokenizer.pad_token = "</s>"
    bert.max_seq_length = 64
    library.SentenceTransformer(modules=[bert, Pooling(16)], device="cpu").save(str(tmp_path / "whole"))
    encoder = Encoder(str(tmp_path / "whole"), "cpu")
    short, long = "warm boat", "The lamp is lit by Una. " * 8
    vectors = encoder.embed([short, long])
    assert vectors[digest_of(short)].shape == (1, 16)
    assert vectors[digest_of(long)].shape == (4, 16)
    assert np.linalg.norm(vectors[digest_of(long)], axis=1) == pytest.approx(np.ones(4), abs=1e-5)


def test_what_is_no_encoder_is_refused_by_a_sentence(encoder_folder, model_folder, tmp_path):
    for name, says in (
        (model_folder, "no modules.json"), ("owner/absent", "hf download owner/absent"), ("a b", "neither a folder"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            Encoder(name, "cpu")
    own = shutil.copytree(encoder_folder, tmp_path / "own")
    (own / "modeling_mine.py").write_text("raise SystemExit('it ran')")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "modeling_mine.Mine"}]
    (own / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Encoder(str(own), "cpu")


def test_an_encoder_in_the_cache_of_the_hub_is_found_by_its_id(encoder_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--encoder"
    shutil.copytree(encoder_folder, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert Encoder("owner/encoder", "cpu").folder == repository / "snapshots" / "abc"


def test_index_keeps_vectors_and_ask_and_chat_use_them(encoder_folder, model_folder, here, run, monkeypatch):
    (here / "docs").mkdir()
    for name, text in TEXTS.items():
        (here / "docs" / name).write_text(text)
    words = ["--model", model_folder, "--store", "kv", "--meaning", str(encoder_folder)]
    code, _, err = run("index", "docs", *words)
    assert (code, "4 texts have vectors" in err) == (0, True), err
    monkeypatch.setattr(Encoder, "embed", lambda encoder, texts, watch: {} if not texts else pytest.fail(str(texts)))
    more = ["docs", *words, "--top-k", "1", "--max-new-tokens", "2"]
    code, out, err = run("ask", "Which temperature?", *more)
    assert (code, "Retrieved: docs/b.txt, characters 0 to " in out) == (0, True), err
    monkeypatch.setattr("sys.stdin.readline", iter(["Which ship?\n", ""]).__next__, raising=False)
    code, out, err = run("chat", *more)
    assert (code, "Retrieved: docs/c.txt, characters 0 to " in out) == (0, True), err


def test_the_page_finds_pieces_of_files_by_meaning(model_folder):
    models = ModelCache(device="cpu", encoder=FakeEncoder())
    documents = tuple(Document(name, text) for name, text in TEXTS.items())
    query = DemoRequest("", "Which temperature?", files=documents, top_k=1)
    (piece,) = prepare(models.take(model_folder), query, Limits()).sources
    assert piece.name == "b.txt"
