# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents are read from what people have, nothing is left out in silence, and their names lie beside the chunks."""

import json
import re
import unicodedata
from dataclasses import replace

import pytest
from worlds import REFERENCE

from hf_blend import ChunkStore
from hf_blend.cli.reading import read_questions
from hf_blend.errors import MissingExtraError, PromptError
from hf_blend.evaluation.documents import Corpus, Document
from hf_blend.evaluation.parsing import FileLimits
from hf_blend.evaluation.retrieving import Piece, Retriever, Splitter, words_of
from hf_blend.evaluation.sources import Source, Sources

pytest.importorskip("semantic_text_splitter", reason="the extra rag is not installed: pip install hf-blend[rag]")
pytest.importorskip("bm25s", reason="the extra rag is not installed: pip install hf-blend[rag]")

HTML = """<html><head><title>T</title><script>var x = 1</script></head><body><nav>Home</nav>
<h1>Keepers</h1><p>Mara keeps the <b>light</b>.</p><p>Tomas *repairs* boats.</p></body></html>"""


def pdf(text: str) -> bytes:
    """A PDF of one page, written by hand."""
    content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("latin-1")
    return pdf_of([
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
    ])  # fmt: skip


def pdf_of(objects: list[bytes]) -> bytes:
    """A PDF of numbered objects, of which the first is its catalog."""
    made, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(made))
    return made + b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + table + end


@pytest.fixture
def folder(tmp_path):
    """A folder as people have them."""
    files = {
        "a.txt": "Mara keeps the light.\n",
        "sub/B.MD": "# Boats\n\nTomas repairs boats.\n",
        "c.HTML": HTML,
        "x.jsonl": '"four"\n\n{"text": "five", "title": "Fifth"}\n',
        ".git/config": "hidden",
        "table.csv": "a,b",
        "script.py": "pass",
        "Makefile": "all:\n",
    }
    for name, text in files.items():
        (tmp_path / "notes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes" / name).write_text(text)
    (tmp_path / "notes" / "d.pdf").write_bytes(pdf("The mill stands on the river."))
    (tmp_path / "notes" / "old.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "notes" / "empty.md").write_text(" \n")
    (tmp_path / "notes" / "mill.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    (tmp_path / "notes" / "data").write_bytes(b"\1\2\3\4")
    return tmp_path / "notes"


def test_text_of_any_ending_html_pdf_and_lines_are_read_whatever_the_case_of_their_endings(folder):
    pytest.importorskip("markdownify")
    pytest.importorskip("pypdf")
    read = {document.name: document.text for document in Corpus([str(folder)])}
    assert set(read) == {"notes/a.txt", "notes/sub/B.MD", "notes/c.HTML", "notes/d.pdf", "notes/x.jsonl:1",
                         "notes/x.jsonl:Fifth", "notes/table.csv", "notes/script.py", "notes/Makefile",
                         "notes/old.txt"}  # fmt: skip
    assert read["notes/old.txt"] == "Grüße"
    assert read["notes/a.txt"] == "Mara keeps the light.\n"
    assert read["notes/c.HTML"] == "# Keepers\n\nMara keeps the **light**.\n\nTomas *repairs* boats.\n"
    assert read["notes/d.pdf"].strip() == "The mill stands on the river."
    assert read["notes/x.jsonl:Fifth"] == "Fifth\n\nfive"


def test_whatever_is_left_out_of_a_folder_is_named_with_its_reason(folder):
    corpus = Corpus([str(folder)])
    list(corpus)
    reasons = {name: reason for name, reason in corpus.left_out if not name.endswith((".pdf", ".HTML"))}
    assert reasons == {
        "notes/.git/config": "hidden",
        "notes/data": "it is not text",
        "notes/empty.md": "it holds no text",
        "notes/mill.png": "it is image/png, not text",
    }
    assert all(name in corpus.said() for name in reasons)


def test_many_files_that_are_left_out_are_counted_by_reason_and_all_named_on_demand(tmp_path, run):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("the drum")
    for number in range(7):
        (notes / f"{number}.png").write_bytes(b"\0")
    corpus = Corpus([str(notes)])
    list(corpus)
    assert corpus.said() == "Left out: 7 files (it is image/png, not text)."
    names = [f"notes/{number}.png" for number in range(7)]
    for command in (["index", notes], ["ask", "where is the drum ?", notes]):
        code, out, err = run(*command, "--model", REFERENCE, "--store", tmp_path / "kv", "--json", "--verbose")
        assert (code, [one["name"] for one in json.loads(out)["left_out"]]) == (0, names)
        assert {one["reason"] for one in json.loads(out)["left_out"]} == {"it is image/png, not text"}
        assert all(f"{name} (it is image/png, not text)" in err for name in names)


def test_a_file_that_is_named_and_cannot_be_read_fails_no_others(folder):
    named = [folder / name for name in ("empty.md", "a.txt", "mill.png", "script.py")]
    corpus = Corpus([*map(str, named)])
    assert [one.name for one in corpus] == ["a.txt", "script.py"]
    assert corpus.left_out == [("empty.md", "it holds no text"), ("mill.png", "it is image/png, not text")]
    corpus = Corpus(["-", str(folder / "a.txt")], [" \n"])
    assert [one.name for one in corpus] == ["a.txt"]
    assert corpus.left_out == [("stdin", "it holds no text")]


def test_a_folder_without_documents_is_refused_with_what_was_left_out(tmp_path):
    (tmp_path / "a.gif").write_bytes(b"\0")
    with pytest.raises(PromptError, match=r"no document was found in .*a\.gif.*\.txt"):
        list(Corpus([str(tmp_path)]))


def test_a_missing_reader_is_named_with_the_command_that_installs_it(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pypdf", None)
    with pytest.raises(MissingExtraError, match=r'pip install "hf-blend\[rag\]"'):
        list(Corpus([str(folder / "d.pdf")]))
    corpus = Corpus([str(folder)])
    assert "notes/d.pdf" not in {document.name for document in corpus}
    assert "pip install" in dict(corpus.left_out)["notes/d.pdf"]


def test_the_rows_that_other_commands_read_are_documents_too(tmp_path):
    row = {"id": "7", "chunks": ["one\u2028two", "three"], "question": "Who?", "answers": ["Ann"]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row, ensure_ascii=False) + '\n{"documents": ["four"]}\n', "utf-8")
    found = {one.name: one.text for one in Corpus([str(tmp_path / "x.jsonl")])}
    assert found == {"x.jsonl:7.1": "one\u2028two", "x.jsonl:7.2": "three", "x.jsonl:2": "four"}


def test_read_questions_ends_a_line_where_the_format_does(tmp_path):
    odd = "".join(f"first{end}part " for end in "\u2028\u2029\x0b\x0c\x1c\x1d\x1e\x85").strip() + "\x85?"
    (tmp_path / "a.txt").write_text("Mara keeps the light.")
    for ends in ("\n", "\r\n"):
        (tmp_path / "q.txt").write_bytes(f"\ufeff{odd}{ends}{ends}Who keeps it?{ends}".encode())
        questions, documents = read_questions(None, [str(tmp_path / "a.txt")], tmp_path / "q.txt")
        assert questions == [odd, "Who keeps it?"]
        assert [one.name for one in documents.listed] == ["a.txt"]
    (tmp_path / "q.jsonl").write_text('{"text": "Who?"}\n"Where?"\n')
    assert read_questions(None, [str(tmp_path / "a.txt")], tmp_path / "q.jsonl")[0] == ["Who?", "Where?"]


def test_documents_come_from_standard_input_too():
    assert [(one.name, one.text) for one in Corpus(["-"], ["a\n", "b"])] == [("stdin", "a\nb")]


SENTENCES = [f"Sentence number {n} says that boat {n * 7} lies in harbour {n * 3}." for n in range(60)]
PROSE = "\n\n".join(" ".join(SENTENCES[start : start + 4]) for start in range(0, 60, 4))


@pytest.fixture(params=["bytes", "mistral"])
def splitter(request, model_folder):
    """Splitters for a byte tokenizer and, where it is there, one of SentencePiece."""
    if request.param == "mistral":
        return Splitter(request.getfixturevalue("mistral_tokenizer"), 128)
    from transformers import AutoTokenizer

    return Splitter(AutoTokenizer.from_pretrained(model_folder), 400)


@pytest.mark.parametrize("is_markdown", [False, True])
def test_pieces_are_whole_sentences_no_longer_than_asked_with_their_place_in_the_document(splitter, is_markdown):
    pieces = splitter.split(Document("a", PROSE, is_markdown=is_markdown))
    assert len(pieces) > 5
    assert all(PROSE[piece.start : piece.stop] == piece.text for piece in pieces)
    assert all(len(piece.ids) <= splitter.chunk_tokens for piece in pieces)
    assert re.sub(r"\s", "", "".join(piece.text for piece in pieces)) == re.sub(r"\s", "", PROSE)
    assert all(piece.text[0] == "S" and piece.text.rstrip()[-1] == "." for piece in pieces)


def test_a_short_document_is_one_piece_as_it_is(splitter):
    (piece,) = splitter.split(Document("a", "Mara keeps the light.\n"))
    assert (piece.start, piece.text) == (0, "Mara keeps the light.\n")
    assert splitter.split(Document("a", " \n")) == []


def piece(text: str) -> Piece:
    return Piece(text.split()[0], 0, text, (1,))


LATIN = "".join(chr(97 + at * 7 % 26) for at in range(997))
LARGE = {
    "prose": PROSE * 3,
    "headings": "\n\n".join(f"# Part {number}\n\n{PROSE}" for number in range(2)),
    "one letter": "a" * 8_000,
    "letters without end": LATIN * 8,
    "characters without punctuation": "".join(chr(0x4E00 + at * 37 % 20_000) for at in range(4_000)),
    "lines": "\n".join(SENTENCES * 3),
    "marks": "a" + "\u0301" * 4_000,
    "white space": f"{' ' * 200_000}end",
}


@pytest.mark.parametrize("is_markdown", [False, True])
@pytest.mark.parametrize("kind", LARGE)
def test_a_large_document_is_cut_by_windows_where_it_is_cut_as_a_whole(kind, is_markdown, model_folder):
    from transformers import AutoTokenizer

    splitter, text = Splitter(AutoTokenizer.from_pretrained(model_folder), 100), LARGE[kind]
    cutter, windows = splitter._splitter("MarkdownSplitter" if is_markdown else "TextSplitter"), []

    class Noting:
        def chunk_indices(self, text):
            windows.append(len(text))
            return cutter.chunk_indices(text)

    splitter._splitter = lambda kind: Noting()
    pieces = splitter.split(Document("a", text, is_markdown=is_markdown))
    assert all(len(piece.ids) <= 100 for piece in pieces)
    assert all(text[piece.start : piece.stop] == piece.text for piece in pieces)
    assert re.sub(r"\s", "", "".join(piece.text for piece in pieces)) == re.sub(r"\s", "", text)
    whole = cutter.chunk_indices(text)
    if kind in ("prose", "lines"):
        assert [(piece.start, piece.text) for piece in pieces] == whole
    if kind != "white space":
        assert max(windows) <= 3200 < len(text), "however long the text is"
        assert sum(windows) < 3 * len(text)


def test_a_document_that_takes_too_long_to_split_is_refused_with_the_option_that_raises_it(model_folder):
    from transformers import AutoTokenizer

    splitter = Splitter(AutoTokenizer.from_pretrained(model_folder), 100, FileLimits(seconds=1e-9))
    with pytest.raises(PromptError, match=r"takes more than 1e-09 s, see --file-seconds"):
        splitter.split(Document("a", PROSE))


TEXTS = ("a: the mill and the river", "b: Mara keeps the light", "c: 灯台の番人はマラです", "d: boats")
PIECES = [piece(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("question", "first"), [("Who keeps the LIGHT?", "b:"), ("灯台", "c:"), ("Which river?", "a:"), ("Boats?", "d:")]
)
def test_the_piece_that_shares_the_telling_words_comes_first(question, first):
    retriever = Retriever(PIECES, top_k=2)
    assert retriever.rank(question)[0].name == first
    assert len(retriever.rank(question)) == 2
    assert retriever.knows(question)


FORMS = ("NFC", "NFD", "NFKC", "NFKD")
READ = {  # a word in a question → a text that has it
    "Dvořák": "The quartet by DVOŘÁK is played",
    "strasse": "Die Straße ist lang",
    "file": "a \ufb01le is open",
    "ΣΊΣΥΦΟΣ": "βράχος Σίσυφος ανεβαίνει",
    "प्रकाशस्तंभ": "गाँव का प्रकाशस्तंभ पुराना है",
    "क़लम": "उसकी \u0958लम टूट गई",
    "مُحَمَّد": "كتب مُحَمَّد رسالة",
    "المنارة": "حارس المـنـارة نائم",
    "등대": "그는 등대를 지킨다",
    "2026": "im Jahr \uff12\uff10\uff12\uff16 gebaut",
    "データ": "古いﾃﾞｰﾀが残る",
    "cooperate": "they co\u00adoperate often",
    "می\u200cخواهم": "من میخواهم بروم",  # noqa: RUF001
    "灯台": "あの灯台は古い",
    "猫": "黒い猫がいる",
    "灯塔": "这座灯塔很旧",
    "ประภาคาร": "เขาดูแลประภาคารทุกคืน",
    "ប៉មភ្លើង": "គាត់ថែរក្សាប៉មភ្លើងរាល់យប់",
    "ປະພາຄານ": "ລາວດູແລປະພາຄານທຸກຄືນ",
    "မီးပြတိုက်": "သူသည်မီးပြတိုက်ကိုစောင့်သည်",
    "Ленинградъ": "въ городѣ ЛЕНИНГРАДЪ",
}
FILLERS = (  # other texts in the same scripts, without the words
    "The mill stands on the river and the boats lie in the harbour",
    "θάλασσα είναι ήσυχη",
    "बारिश में नाव किनारे पर है",
    "السفينة في البحر اليوم",
    "비가 오는 날에는 쉰다",
    "雨の日は休みです",
    "下雨天他们休息",
    "วันฝนตกพวกเราหยุดงาน",
    "ថ្ងៃភ្លៀងយើងឈប់សម្រាក",
    "ມື້ຝົນຕົກພວກເຮົາພັກ",
    "မိုးရွာသောနေ့တွင်နားသည်",
    "дождь идёт и мы отдыхаем",
)


@pytest.mark.parametrize("word", READ)
def test_retrieval_finds_a_word_as_people_read_it_however_either_side_is_encoded(word):
    for asked, written in ((one, other) for one in FORMS for other in FORMS):
        texts = [*FILLERS, unicodedata.normalize(written, READ[word])]
        pieces = [Piece(str(number), 0, text, (1,)) for number, text in enumerate(texts)]
        for question in (word, word.upper()):
            retriever = Retriever(pieces, top_k=1)
            (best,) = retriever.rank(unicodedata.normalize(asked, question))
            assert (best.text, retriever.knows(question)) == (texts[-1], True), (asked, written)


def test_retrieval_takes_a_word_with_its_marks_for_one_word():
    assert words_of("हिन्दी में مُحَمَّد e\u0323\u0301") == ["हिन्दी", "में", "مُحَمَّد", "ẹ́"]
    assert words_of("don't 3.14 a_b") == ["don", "t", "3", "14", "a", "b"]
    assert words_of("灯台の") == ["灯", "台", "の", "灯台", "台の"]
    assert words_of("\u200b\u00ad ؟") == []


def test_a_question_without_a_known_word_gets_the_beginning_and_it_is_known():
    retriever = Retriever(PIECES, top_k=2)
    assert retriever.rank("Xyzzy?") == PIECES[:2]
    assert not retriever.knows("Xyzzy?")


@pytest.mark.parametrize("top_k", [0, 4, 9])
def test_nothing_is_chosen_where_all_pieces_may_come(top_k):
    assert Retriever(PIECES, top_k).rank("Who?") == PIECES


OLD = Source("notes/a.md", "/somewhere/notes/a.md", "mine", "f" * 64, 512, 1.0, ("1" * 64, "2" * 64))
OTHER = Source("notes/b.md", "/somewhere/notes/b.md", "mine", "f" * 64, 512, 2.0, ("2" * 64, "3" * 64))


@pytest.fixture
def store(tmp_path):
    with ChunkStore.open(tmp_path / "kv") as opened:
        yield opened


def test_indexing_a_document_again_replaces_its_entry_which_another_store_reads(store, tmp_path):
    new = Source(OLD.name, OLD.path, "mine", OLD.fingerprint, 256, 3.0, ("4" * 64,))
    other_model = Source(OLD.name, OLD.path, "yours", "e" * 64, 256, 3.0, ("5" * 64,))
    Sources(store).add([OTHER, OLD])
    Sources(store).add([new, other_model])
    with ChunkStore.open(tmp_path / "kv") as again:
        assert list(Sources(again)) == [new, other_model, OTHER]


def test_a_chunk_that_another_document_has_too_stays(store):
    Sources(store).add([OLD, OTHER])
    assert Sources(store).remove([OLD]) == ["1" * 64]
    assert list(Sources(store)) == [OTHER]
    assert Sources(store).remove([OTHER]) == ["2" * 64, "3" * 64]


def test_a_document_is_found_by_name_path_and_folder_however_its_accents_are_encoded(store):
    decomposed = replace(OLD, name=unicodedata.normalize("NFD", "café/Årsta.md"), path="")
    Sources(store).add([OLD, OTHER, decomposed])
    for names, documents in (
        (("notes/a.md", OLD.path), [OLD]),
        (("notes", "notes/"), [OLD, OTHER]),
        (("note",), []),
        (("café/Årsta.md", "café", decomposed.name), [decomposed]),
    ):
        for name in names:
            assert Sources(store).named(unicodedata.normalize("NFC", name)) == documents, name


def test_store_without_a_folder_keeps_no_names(tmp_path, store):
    with ChunkStore.open("memory://") as opened:
        Sources(opened).add([OLD])
        assert list(Sources(opened)) == []
    Sources(store).add([OLD])
    with ChunkStore.open(tmp_path / "kv", namespace="other") as opened:
        assert list(Sources(opened)) == []
