# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents are read as people have them, what is left out is named, and pieces are found."""

import json
import os
import re
import sys
import unicodedata

import pytest

from hf_blend.errors import MissingExtraError, PromptError
from hf_blend.evaluation import documents
from hf_blend.evaluation.documents import Document, printable, read_corpus
from hf_blend.evaluation.retrieving import Piece, Retriever, Splitter

for module in ("semantic_text_splitter", "bm25s", "markitdown"):
    pytest.importorskip(module, reason="the extra rag is not installed: pip install hf-blend[rag]")

HTML = b"<html><script>var x = 1</script><body><h1>Keepers</h1><p>Mara keeps the <b>light</b>.</p></body></html>"


def pdf(text):
    """A PDF of one page, written by hand."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    content = b"%PDF-1.4\n"
    table = b""
    for number, text in enumerate(objects, 1):
        table += b"%010d 00000 n \n" % len(content)
        content += b"%d 0 obj\n%s\nendobj\n" % (number, text)
    trailer = b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % len(content)
    return content + b"xref\n0 5\n0000000000 65535 f \n" + table + trailer


GOOD = {  # name → bytes, what is read of it
    "a.txt": (b"Mara keeps the light.\n", "Mara keeps the light.\n"),
    "bom.txt": ("\ufeffGrüße".encode(), "Grüße"),
    "c.HTML": (HTML, "# Keepers\n\nMara keeps the **light**."),
    "d.pdf": (pdf("The mill stands on the river."), "The mill stands on the river."),
}
BAD = {  # name → bytes, why it is left out
    "data": (b"\1\2\0\4", "it is not text"),
    "latin.txt": ("Grüße".encode("latin-1"), "it is not UTF-8 (byte 2)"),
    "empty.md": (b" \n", "it holds no text"),
    "no.pdf": (b"%PDF-1.4 nothing", ""),
    "deep.ipynb": (b"[" * 100_000, ""),
    "half.jsonl": (rb'"\ud83d"', "it holds U+D83D, half a character"),
    "odd.jsonl": (b"{'a'}", "line 1 is not JSON"),
}


@pytest.fixture
def folder(tmp_path):
    """A folder as people have them."""
    root = tmp_path / "notes"
    files = {**GOOD, **BAD, ".git/config": (b"hidden",), "__pycache__/x.txt": (b"made",)}
    for name, (content, *_) in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "secret.txt").write_text("out of the folder")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    return root


def test_read_corpus_reads_every_format_and_names_what_it_leaves_out(folder):
    corpus = read_corpus([str(folder)])
    texts = {document.name: document.text for document in corpus.documents}
    assert texts.keys() == {f"notes/{name}" for name in GOOD}
    for name, (_, expected) in GOOD.items():
        text = texts[f"notes/{name}"]
        assert text.strip() == expected.strip(), name
    reasons = dict(corpus.left_out)
    assert reasons.keys() == {f"notes/{name}" for name in BAD}
    for name, (_, expected) in BAD.items():
        reason = reasons[f"notes/{name}"]
        assert reason.startswith(expected), name
        assert "\n" not in reason
    assert re.search(r"Left out: .*\d files \(.*\)", corpus.summary())
    assert corpus.rows()[0].keys() == {"name", "reason"}


def test_read_corpus_refuses_single_bad_file_in_sentence(folder):
    for name in BAD:
        with pytest.raises(PromptError, match=r"Give a file with text|Correct it"):
            read_corpus([str(folder / name)])


def test_read_corpus_refuses_what_is_too_large_no_file_or_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MOST_MEGABYTES", 1)
    (tmp_path / "large.txt").write_bytes(b"a" * (1 << 20) + b"b")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("large.txt", "more than 1 MB"), ("pipe", "it is a pipe"), ("nowhere", "no file or folder")):
        with pytest.raises(PromptError, match=words):
            read_corpus([str(tmp_path / name)])


def test_read_corpus_names_extra_that_is_missing(folder, monkeypatch):
    documents._converter.cache_clear()
    monkeypatch.setitem(sys.modules, "markitdown", None)
    with pytest.raises(MissingExtraError, match=r'pip install "hf-blend\[rag\]"'):
        read_corpus([str(folder / "d.pdf")])
    corpus = read_corpus([str(folder)])
    reasons = dict(corpus.left_out)
    assert "pip install" in reasons["notes/d.pdf"]


def test_read_corpus_reads_rows_and_standard_input(tmp_path):
    rows = [
        {"id": "7", "chunks": ["one\u2028two", "three"], "question": "Who?", "answers": ["Ann"]},
        {"documents": ["four"]},
        {"text": "five", "title": "Fifth\x1b[2J"},
    ]
    path = tmp_path / "x.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines), "utf-8")
    corpus = read_corpus([str(path), "-"], ["a\n", "b"])
    texts = {document.name: document.text for document in corpus.documents}
    assert texts == {
        "x.jsonl:7.1": "one\u2028two",
        "x.jsonl:7.2": "three",
        "x.jsonl:2": "four",
        r"x.jsonl:Fifth\x1b[2J": "Fifth\x1b[2J\n\nfive",
        "stdin": "a\nb",
    }
    with pytest.raises(PromptError, match="it holds no text"):
        read_corpus(["-"], [" \n"])


def test_printable_escapes_what_terminal_would_obey():
    assert printable("a\x1b[2Jb\u202ec\u3000é") == "a\\x1b[2Jb\\u202ec\u3000é"


SENTENCES = [f"Sentence number {n} says that boat {n * 7} lies in harbour {n * 3}." for n in range(60)]
PARAGRAPHS = [" ".join(SENTENCES[start : start + 4]) for start in range(0, 60, 4)]
PROSE = "\n\n".join(PARAGRAPHS)
LARGE = {
    "prose": PROSE * 3,
    "lines": "\n".join(SENTENCES * 3),
    "marks": "a" + "\u0301" * 4_000,
    "white space": f"{' ' * 200_000}end",
}


@pytest.mark.parametrize("is_markdown", [False, True])
@pytest.mark.parametrize("kind", LARGE)
def test_splitter_cuts_by_windows_where_it_cuts_whole(kind, is_markdown, byte_tokenizer):
    splitter = Splitter(byte_tokenizer, 100)
    text = LARGE[kind]
    name = "_markdown_splitter" if is_markdown else "_text_splitter"
    library = getattr(splitter, name)
    windows = []

    class Recorded:
        def chunk_indices(self, text):
            windows.append(len(text))
            return library.chunk_indices(text)

    splitter.__dict__[name] = Recorded()
    pieces = splitter.split(Document("a", text, is_markdown=is_markdown))
    joined = ""
    indices = []
    for piece in pieces:
        assert len(piece.ids) <= 100
        assert text[piece.start : piece.stop] == piece.text
        joined += piece.text
        indices.append((piece.start, piece.text))
    assert "".join(joined.split()) == "".join(text.split())
    if kind in ("prose", "lines"):
        assert indices == library.chunk_indices(text)
    if kind != "white space":
        assert max(windows) <= 3200 < len(text), "however long the text is"
        assert sum(windows) < 3 * len(text)


@pytest.fixture(scope="module")
def byte_tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


TEXTS = ("a: the mill and the river", "b: Mara keeps the light", "c: 灯台の番人はマラです", "d: boats")
PIECES = [Piece(text[:2], 0, text, (1,)) for text in TEXTS]


@pytest.mark.parametrize(("question", "name"), [("Who keeps the LIGHT?", "b:"), ("灯台", "c:"), ("Boats?", "d:")])
def test_retriever_ranks_piece_with_telling_words_first(question, name):
    retriever = Retriever(PIECES, top_k=2)
    first, _ = retriever.rank(question)
    assert first.name == name
    assert retriever.knows(question)


def test_retriever_gives_beginning_where_no_word_is_known_and_all_where_all_may_come():
    retriever = Retriever(PIECES, top_k=2)
    assert retriever.rank("Xyzzy?") == PIECES[:2]
    assert not retriever.knows("Xyzzy?")
    for top_k in (0, 4, 9):
        retriever = Retriever(PIECES, top_k)
        assert retriever.rank("Xyzzy?") == PIECES
        assert retriever.knows("Xyzzy?")


FORMS = "NFC NFD NFKC NFKD".split()
READ = {  # a word in a question → a text that has it
    "Dvořák": "The quartet by DVOŘÁK is played",
    "strasse": "Die Straße ist lang",
    "प्रकाशस्तंभ": "गाँव का प्रकाशस्तंभ पुराना है",
    "مُحَمَّد": "كتب مُحَمَّد رسالة",
    "등대": "그는 등대를 지킨다",
    "データ": "古いﾃﾞｰﾀが残る",
    "cooperate": "they co\u00adoperate often",
    "ประภาคาร": "เขาดูแลประภาคารทุกคืน",
    "မီးပြတိုက်": "သူသည်မီးပြတိုက်ကိုစောင့်သည်",
}
FILLERS = (  # other texts in the same scripts, without the words
    "The mill stands on the river and the boats lie in the harbour",
    "बारिश में नाव किनारे पर है",
    "السفينة في البحر اليوم",
    "비가 오는 날에는 쉰다",
    "雨の日は休みです",
    "วันฝนตกพวกเราหยุดงาน",
    "မိုးရွာသောနေ့တွင်နားသည်",
)


@pytest.mark.parametrize("word", READ)
def test_retriever_finds_word_however_either_side_is_encoded(word):
    for written in FORMS:
        sought = unicodedata.normalize(written, READ[word])
        pieces = [Piece(text, 0, text, (1,)) for text in (*FILLERS, sought)]
        retriever = Retriever(pieces, top_k=1)
        for asked in FORMS:
            question = unicodedata.normalize(asked, word.upper())
            (found,) = retriever.rank(question)
            assert found.text == sought, (asked, written)
