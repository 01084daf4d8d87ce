# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files of strangers: whatever is in them, each is indexed or left out with a reason, and names are only text."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import psutil
import pytest
from worlds import REFERENCE, reference_questions

from hf_blend import ChunkStore
from hf_blend.cli.main import main
from hf_blend.errors import PromptError
from hf_blend.evaluation.bundled import open_model
from hf_blend.evaluation.demo.page import Demo
from hf_blend.evaluation.documents import Corpus
from hf_blend.evaluation.formats import _pdf
from hf_blend.evaluation.parsing import FileLimits, FileReader, _answer, printable
from hf_blend.evaluation.retrieving import Splitter
from hf_blend.evaluation.sources import Sources

from .test_documents import pdf, pdf_of

for package in ("semantic_text_splitter", "bm25s", "bs4", "markdownify", "pypdf"):
    pytest.importorskip(package, reason="the extra rag is not installed: pip install hf-blend[rag]")

DEEP = 1200
LETTER = re.compile(r"[^\x20-\x7e]")  # nothing else may reach a terminal from these names
GOOD_PDF = pdf("The mill stands on the river.")


def pdf_with(old: bytes, new: bytes) -> bytes:
    assert old in GOOD_PDF
    return GOOD_PDF.replace(old, new)


def flipped(seed: int) -> bytes:
    """A PDF with some bytes that are others."""
    chance, made = random.Random(seed), bytearray(GOOD_PDF)
    for _ in range(8):
        made[chance.randrange(len(made))] = chance.randrange(256)
    return bytes(made)


JSONL = [
    b"[" * 200_000,
    b'{"text":' * 100_000,
    b'{"text": "good", "title": ' + b"[" * 400 + b"]" * 400 + b"}",
    '{"text": "one\u2028two"}\n"three"\n'.encode(),
    b'{"text": "half \\ud800"}',
    b'{"text": "good", "title": "half \\ud800"}',
    b'{"text": "good", "title": "\\u001b[31mred\\n"}',
    b'{"text": "good", "title": "' + b"long" * 10_000 + b'"}',
    b'{"text": "good", "title": {"a": 1}, "name": 5, "id": null}',
    b'{"text": "good"}\r\n{"text": "too"}\r\n',
    b'"good"\n{"body": 1}\n',
    b'"good"\n{',
    b'{"text": 5}',
    b'{"text": null}',
    b'{"text": ["a"]}',
    b'{"text": ""}',
    b'{"text": "\\u0000"}',
    b"1" * 5000,
    b"NaN",
    b"null",
    b"\xff\xfe\x00",
    b"\xef\xbb\xbf" + b'"good"',
    b'"a" "b"',
    b'"a\tb"',
    b"\n \n",
]
HTML = [
    *(f"<{tag}>".encode() * DEEP + b"deep" for tag in ("div", "b", "blockquote", "ul><li", "pre")),
    b"<table><tr><td>" * 400 + b"deep",
    b"<table>" + b"<tr><td>x" * 1000,
    b"<![foo[<!x]]>",
    b"<![CDATA[<!x",
    b"<!x",
    b"<!DOCTYPE [<!ENTITY a 'b'><!ENTITY c '&a;&a;'>]><p>&c;",
    b"<p>&#x110000; &#xD800; &#0; &#99999999999999999999;",
    b"<p>good<!-- never closed",
    b"<a href=",
    b"<p " + b"a=b " * 5000 + b">good",
    b"<script>alert(1)</script>",
    b"<td colspan=99999999>good",
    b"<ol start=99999999999999999999><li>good",
    b"<ol start=-x><li>good",
    b"<p>good\x00bad",
    b"\xff\xfe<\x00p\x00>",
    b"<" * 5000,
    b"<h9999999>good</h9999999>",
    b"<h99999999999999999999999>good",
    b"<svg><p>hidden</svg>",
    b"",
]
PDF = [
    pdf_with(b"<< /Length", b"<< /Filter /Foo /Length"),
    pdf_with(b"<< /Length", b"<< /Filter /FlateDecode /Length"),
    pdf_with(b"<< /Length", b"<< /Filter /LZWDecode /Length"),
    pdf_with(b"<< /Length", b"<< /Filter [/ASCII85Decode /ASCIIHexDecode] /Length"),
    pdf_with(b"/Root 1 0 R", b"/Root 1 0 R /Encrypt << /Filter /Foo >>"),
    pdf_with(b"/Root 1 0 R", b"/Root 1 0 R /Encrypt << /Filter /Standard /V 9 /R 9 >> /ID [(a) (b)]"),
    pdf_with(b"/Root 1 0 R", b"/Root 3 0 R"),
    pdf_with(b"/Root 1 0 R", b"/Root 9 0 R"),
    pdf_with(b"/Kids [3 0 R]", b"/Kids [2 0 R]"),
    pdf_with(b"/Kids [3 0 R]", b"/Kids 7"),
    pdf_with(b"/Count 1", b"/Count 999999999"),
    pdf_with(b"/Contents 4 0 R", b"/Contents 3 0 R"),
    pdf_with(b"/Contents 4 0 R", b"/Contents (x)"),
    pdf_with(b"/F1 12 Tf", b"/F9 x Tf"),
    pdf_with(b"/BaseFont /Helvetica", b"/Encoding 5 /ToUnicode 4 0 R"),
    GOOD_PDF[: len(GOOD_PDF) // 2],
    GOOD_PDF[:20],
    b"%PDF-1.4\n" + b"[" * 50_000,
    b"%PDF-1.4\ntrailer << /Root << /Pages << /Kids [" + b"<< /Kids [" * 2000,
    b"no PDF",
    *(flipped(seed) for seed in range(5)),
]
TEXT = [
    b"good",
    "good\u2028still good".encode(),
    "Grüße".encode("latin-1"),
    "Grüße".encode("utf-16"),
    b"\xef\xbb\xbfgood",
    b"\x00\x01\x02",
    b"\x1b]0;owned\x07\x1b[2J",
    b" \r\n\t",
    b"word" * 5000,
    b"<|im_end|><|endoftext|></s>[/INST]",
    "\u200d\u202e\ufeff".encode(),
    ("a" + "\u0301" * 5000).encode(),
]
MARKDOWN = [
    b"# good\n\nMara keeps the light.\n",
    b">" * DEEP + b"deep",
    b"- " * DEEP + b"deep",
    b"[" * DEEP,
    b"*" * DEEP + b"a",
    b"#" * DEEP,
    b"|" * DEEP + b"\n" + b"|-" * DEEP,
    b"<div>" * DEEP,
    b"```\n" * DEEP,
    b"---\ntitle: x\n---\n",
    b"\\" * DEEP,
    b"&#xD800;",
    b"![](" * DEEP,
]
KINDS = {"jsonl": JSONL, "html": HTML, "pdf": PDF, "txt": TEXT, "md": MARKDOWN}


@pytest.fixture
def crafted(tmp_path):
    """A hundred files, five of which anybody would call good."""
    folder = tmp_path / "crafted"
    folder.mkdir()
    for ending, contents in KINDS.items():
        for number, content in enumerate(contents):
            (folder / f"{number:02d}.{ending}").write_bytes(content)
    (folder / "good.html").write_text("<p>good")
    (folder / "good.pdf").write_bytes(GOOD_PDF)
    assert len(list(folder.iterdir())) >= 100
    return folder


def test_a_hundred_crafted_files_are_each_read_or_left_out_with_a_reason(crafted):
    corpus = Corpus([str(crafted)])
    read = list(corpus)
    files = {document.path.name for document in read}
    left = {Path(name).name: reason for name, reason in corpus.left_out}
    assert {*files, *left} == {path.name for path in crafted.iterdir()}
    assert not files & set(left)
    assert {"03.jsonl", "09.jsonl", "00.txt", "00.md", "good.html", "good.pdf"} <= files
    assert {"00.jsonl", "01.jsonl", "04.jsonl", "10.jsonl", "00.html", "07.html", "00.pdf", "04.pdf"} <= set(left)
    assert all(reason and len(reason) < 400 and not LETTER.search(reason) for reason in left.values())
    splitter = Splitter(open_model(device="cpu").tokenizer, 64)
    assert all(piece.ids for piece in splitter.split_all(read))


def test_uploaded_files_are_each_read_or_named_without_a_folder_of_the_server(crafted):
    paths = sorted(map(str, crafted.iterdir()))
    read, said = Demo().read(paths)
    named = {path for path in paths if f"{Path(path).name} (" in said}
    assert {str(crafted / document.path.name) for document in read} | named == set(paths)
    assert str(crafted.parent) not in said
    assert not LETTER.search(said)
    assert "11.jsonl (line 2 is not JSON: Expecting property name enclosed in double quotes)" in said


def test_names_that_are_no_utf8_or_escape_sequences_are_indexed_asked_about_and_printed_escaped(tmp_path, run):
    folder, store = tmp_path / "notes", tmp_path / "kv"
    folder.mkdir()
    for name in (b"caf\xe9.txt", b"\x1b[31mred.txt", b"bad\x1b.gif"):
        try:
            path = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
            path.write_bytes(b"\0" if path.suffix == ".gif" else b"the drum")
        except OSError:
            pytest.skip("this file system takes no such names")
    common = ("--model", REFERENCE, "--store", store)
    said = [
        run("index", folder, *common),
        run("ask", "where is the drum ?", folder, *common),
        run("store", "ls", "--store", store),
        run("store", "ls", "--store", store, "--json"),
    ]
    assert [code for code, *_ in said] == [0] * 4, said
    for _, out, err in said:
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", out + err)
    for _, out, _ in said[1:]:
        assert "caf\\xe9.txt" in out.replace("\\\\", "\\")
        assert "\\x1b[31mred.txt" in out.replace("\\\\", "\\")
    assert "bad\\x1b.gif" in said[0][2]
    code, out, _ = run("store", "rm", "notes/caf\\xe9.txt", "--store", store, "--json")
    assert (code, json.loads(out)["documents"]) == (0, 1)


def test_printable_leaves_text_and_escapes_what_is_none():
    assert printable("Ä 灯台\u3000émoji 🙂") == "Ä 灯台\u3000émoji 🙂"
    assert printable("a\x1b\x9b\u202e\n\udce9\ud800") == r"a\x1b\x9b\u202e\n\xe9\ud800"


def test_links_out_of_a_folder_are_left_out_and_links_inside_are_read(tmp_path):
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "real.txt").write_text("real")
    (folder / ".hidden").write_text("secret")
    (tmp_path / "outside.txt").write_text("secret")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("secret")
    links = {
        "in.txt": "sub/real.txt",
        "out.txt": "../outside.txt",
        "dots.txt": "sub/../../outside.txt",
        "sub/up": "..",
        "there": "../other",
        "broken.txt": "none.txt",
        "loop.txt": "loop.txt",
        "covered.txt": ".hidden",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    (tmp_path / "door").symlink_to(folder)
    for given in (folder, tmp_path / "door"):
        corpus = Corpus([str(given)])
        assert {one.name: one.text for one in corpus} == {"notes/in.txt": "real", "notes/sub/real.txt": "real"}
        assert dict(corpus.left_out) == {
            "notes/.hidden": "hidden",
            "notes/covered.txt": "hidden",
            "notes/out.txt": "a link out of the folder",
            "notes/dots.txt": "a link out of the folder",
            "notes/there": "a link out of the folder",
            "notes/sub/up": "a link to a folder",
            "notes/broken.txt": "a link to no file",
            "notes/loop.txt": "a link to no file",
        }


def test_folders_deeper_than_python_calls_itself_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(DEEP):
        os.mkdir("d")
        os.chdir("d")
    Path("deep.txt").write_text("deep")
    try:
        assert [one.text for one in Corpus([str(tmp_path)])] == ["deep"]
    finally:  # pytest cannot remove them either
        os.remove("deep.txt")
        for _ in range(DEEP):
            os.chdir("..")
            os.rmdir("d")


@pytest.mark.parametrize(("name", "megabytes"), [("large.txt", 64), ("large.pdf", 64), ("large.html", 8)])
def test_a_file_that_is_too_large_is_not_read_whole(name, megabytes, tmp_path):
    (tmp_path / name).write_bytes(b"a" * 10_000)
    os.truncate(tmp_path / name, 1 << 40)
    with pytest.raises(PromptError, match=f"more than {megabytes} MB, see --file-megabytes"):
        list(Corpus([str(tmp_path / name)]))


def pages_over_one_stream(count: int, operators: int) -> bytes:
    """A small PDF that takes long: each page has all text of the same compressed stream."""
    content = zlib.compress(b"BT /F1 12 Tf " + b"1 0 0 1 72 720 Tm (word) Tj " * operators + b"ET")
    kids = b" ".join(b"%d 0 R" % (number + 5) for number in range(count))
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 3 0 R /Resources 4 0 R >>"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, count),
        b"<< /Filter /FlateDecode /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>",
        *[page] * count,
    ]
    return pdf_of(objects)


ENDLESS = {
    "pages.pdf": pages_over_one_stream(1000, 20_000),
    "page.pdf": pages_over_one_stream(1, 2_000_000),
    "page.html": b"<p>good <b>word</b></p>\n" * 300_000,
}


def test_a_file_that_takes_too_long_is_left_out_and_its_process_ends_with_the_corpus(tmp_path):
    folder = tmp_path / "slow"
    folder.mkdir()
    for name, content in ENDLESS.items():
        (folder / name).write_bytes(content)
    (folder / "z.txt").write_text("good")
    corpus, here = Corpus([str(folder)], limits=FileLimits(seconds=0.1)), psutil.Process()
    assert [one.text for one in corpus] == ["good"]
    assert not here.children()
    left_out = dict(corpus.left_out)
    assert set(left_out) == {f"slow/{name}" for name in ENDLESS}
    assert all(re.fullmatch(r"it takes more than \S+ s, see --file-seconds", reason) for reason in left_out.values())


def test_a_parser_that_was_killed_is_started_again(tmp_path):
    (tmp_path / "a.html").write_text("<p>good")
    here = psutil.Process()
    with FileReader(FileLimits(seconds=600)) as reader:
        assert reader.read(tmp_path / "a.html").content == "good\n"
        (process,) = here.children()
        process.kill()
        with pytest.raises(PromptError, match="its parser ended without an answer"):
            reader.read(tmp_path / "a.html")
        assert reader.read(tmp_path / "a.html").content == "good\n"
    assert not here.children()


def test_a_text_that_grows_beyond_its_limit_is_left_out(tmp_path):
    content, path = pages_over_one_stream(20, 100), tmp_path / "grows.pdf"
    path.write_bytes(content)
    assert len(_pdf(content, 1 << 20).content) > 8_000
    assert _answer("read", str(path), 5_000)["why"].endswith("MB, see --file-megabytes")
    assert 5_000 < len(_pdf(content, 5_000).content) < 6_000, "the other pages are not read"


@pytest.fixture
def no_files(tmp_path):
    """What a reader may wait for without end."""
    (tmp_path / "odd").mkdir()
    os.mkfifo(tmp_path / "odd" / "pipe.txt")
    os.mkfifo(tmp_path / "odd" / "pipe.pdf")
    (tmp_path / "odd" / "link.html").symlink_to("pipe.txt")
    with contextlib.chdir(tmp_path / "odd"), socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.md")  # the name of a socket is short
        yield tmp_path / "odd"


def test_what_is_no_file_is_never_waited_for_in_a_folder_or_named(no_files, run):
    (no_files / "good.txt").write_text("good")
    corpus = Corpus([str(no_files)])
    assert [one.text for one in corpus] == ["good"]
    assert dict(corpus.left_out) == dict.fromkeys(
        ("odd/pipe.txt", "odd/pipe.pdf", "odd/socket.md"), "no file that can be read"
    ) | {"odd/link.html": "a link to no file"}
    named = [no_files / name for name in ("pipe.txt", "pipe.pdf", "link.html", "socket.md")]
    for path in (*named, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(PromptError, match="a pipe, a socket or a device, for which nobody waits"):
            list(Corpus([str(path)]))
        corpus = Corpus([str(path), str(no_files / "good.txt")])
        assert ([one.text for one in corpus], [name for name, _ in corpus.left_out]) == (["good"], [path.name])
    code, _, err = run("ask", "--questions", no_files / "pipe.txt", no_files / "good.txt", "--model", REFERENCE)
    assert code == 2
    assert "for which nobody waits" in err


@contextlib.contextmanager
def as_nobody():
    """Without the rights of root, which may enter everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_what_may_not_be_entered_is_left_out_by_name():
    folder = Path(tempfile.mkdtemp())
    try:
        for path in (folder, folder / "notes", folder / "notes" / "shut"):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
        (folder / "notes" / "good.txt").write_text("good")
        (folder / "notes" / "shut" / "in.txt").write_text("shut in")
        (folder / "notes" / "link.txt").symlink_to("shut/in.txt")
        (folder / "notes" / "secret.txt").write_text("secret")
        for path in (folder / "notes" / "shut", folder / "notes" / "secret.txt"):
            path.chmod(0)
        with as_nobody():
            corpus = Corpus([str(folder / "notes")])
            assert [one.text for one in corpus] == ["good"]
            with pytest.raises(PromptError, match=r"no file or folder .*in\.txt' that can be read"):
                Corpus([str(folder / "notes" / "shut" / "in.txt")])
        refused = "it cannot be read: Permission denied"
        assert dict(corpus.left_out) == {
            "notes/link.txt": refused,
            "notes/shut": "no file that can be read",
            "notes/secret.txt": "Permission denied",
        }
    finally:
        (folder / "notes" / "shut").chmod(0o755)
        shutil.rmtree(folder)


def index_command(document):
    """The words that index a document in a process of its own, into a store beside it."""
    where = ["--model", REFERENCE, "--store", str(document.parent / "kv")]
    return [sys.executable, "-P", "-m", "hf_blend.cli.main", "index", str(document), *where]


@pytest.mark.slow
def test_ctrl_c_ends_index_with_130_keeps_what_is_stored_and_leaves_no_process(tmp_path):
    words, chance = reference_questions()[0]["chunks"][0].split(), random.Random(1)
    texts = [" ".join(chance.sample(words, len(words))) for _ in range(60)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    command = index_command(tmp_path / "many.jsonl")
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(list((tmp_path / "kv").rglob("*.safetensors"))) < 5:
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130, err
    assert re.search(
        r"Stopped\. [\d,]+ chunks are stored and stay, [\d,]+ are missing\. Run the same command again", err
    )
    assert "Traceback" not in err
    with ChunkStore.open(tmp_path / "kv") as store:
        stored = len(list(store.entries()))
        assert stored > 0
        assert not [found for found in store.check() if found.reason]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["present"] == stored


@pytest.mark.slow
def test_ctrl_c_ends_index_while_a_file_is_parsed(tmp_path):
    (tmp_path / "pages.pdf").write_bytes(ENDLESS["pages.pdf"])
    command = index_command(tmp_path / "pages.pdf")
    running = subprocess.Popen(
        [*command, "--file-seconds", "600"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (children := psutil.Process(running.pid).children()):
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert (running.returncode, "Traceback" in err) == (130, False), err
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_standard_input_that_is_no_text_is_refused():
    def lines():
        yield b"\xff".decode()

    with pytest.raises(PromptError, match="standard input cannot be read as text: it is not UTF-8"):
        list(Corpus(["-"], lines()))
    with pytest.raises(PromptError, match=r"U\+DCFF"):
        list(Corpus(["-"], ["\udcff"]))


GOOD = {"name": "notes/a.md", "path": "/a.md", "model": "mine", "fingerprint": "f" * 64, "chunk_tokens": 512,
        "created": 1.0, "digests": ["1" * 64], "format": "hf_blend.source/1"}  # fmt: skip
POISON = {
    "deep": "[" * 100_000,
    "deep name": json.dumps({**GOOD, "name": 0}).replace("0", "[" * 50_000 + "]" * 50_000, 1),
    "name": json.dumps({**GOOD, "name": 5}),
    "created": json.dumps({**GOOD, "created": "x"}),
    "endless": json.dumps({**GOOD, "created": float("inf")}),
    "huge": json.dumps({**GOOD, "created": 10**400}),
    "chunk_tokens": json.dumps({**GOOD, "chunk_tokens": "many"}),
    "none": json.dumps({**GOOD, "chunk_tokens": 0}),
    "digests": json.dumps({**GOOD, "digests": [["1"]]}),
    "folders": json.dumps({**GOOD, "digests": ["../../x"]}),
    "digits": json.dumps({**GOOD, "digests": 5}),
    "fingerprint": json.dumps({**GOOD, "fingerprint": None}),
    "more": json.dumps({**GOOD, "more": 1}),
    "less": json.dumps({"format": GOOD["format"]}),
}


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """A folder with a document, the store that it is indexed in, and where that keeps the document's name."""
    folder = tmp_path_factory.mktemp("poisoned")
    (folder / "good.txt").write_text("the drum")
    with pytest.raises(SystemExit) as ended:
        main(["index", str(folder), "--model", REFERENCE, "--store", str(folder / "kv")])
    assert not ended.value.code
    (path,) = (folder / "kv" / "sources").rglob("*.json")
    return folder, folder / "kv", path.parent


@pytest.mark.parametrize("kind", POISON)
def test_what_is_no_entry_of_a_document_is_passed_over(kind, indexed):
    _, store, entries = indexed
    (entries / "poison.json").write_text(POISON[kind])
    with ChunkStore.open(store) as opened:
        sources = Sources(opened)
        assert [one.name for one in sources] == [f"{indexed[0].name}/good.txt"]
        assert sources.named("notes/a.md") == []
        assert sources.chunk_tokens([], "mine") == {}
        assert sources.remove([]) == []
    (entries / "poison.json").unlink()


def test_what_can_block_a_reader_is_passed_over(indexed):
    _, store, entries = indexed
    os.mkfifo(entries / "pipe.json")
    (entries / "large.json").touch()
    os.truncate(entries / "large.json", 1 << 40)
    (entries / "folder.json").mkdir()
    with ChunkStore.open(store) as opened:
        assert len(list(Sources(opened))) == 1
    for name in ("pipe", "large"):
        (entries / f"{name}.json").unlink()
    (entries / "folder.json").rmdir()


def test_a_store_with_poisoned_entries_is_listed_asked_and_indexed(indexed, run):
    folder, store, entries = indexed
    for number, text in enumerate(POISON.values()):
        (entries / f"poison{number}.json").write_text(text)
    (entries / "red.json").write_text(json.dumps({**GOOD, "name": "\x1b[31mred", "model": "\x1b[2Jmine"}))
    common = ("--model", REFERENCE, "--store", store)
    said = [
        run("store", "ls", "--store", store),
        run("store", "ls", "--chunks", "--store", store, "--json"),
        run("ask", "where is the drum ?", folder / "good.txt", *common),
        run("index", folder / "good.txt", *common),
    ]
    assert [code for code, *_ in said] == [0] * 4, said
    assert "good.txt" in said[0][1]
    assert r"\x1b[31mred" in said[0][1]
    assert not any("\x1b" in out + err for _, out, err in said)
    code, out, _ = run("store", "rm", r"\x1b[31mred", "--store", store, "--json")
    assert (code, json.loads(out)["documents"]) == (0, 1)
    assert not (entries / "red.json").exists()
