# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Each format of documents becomes the text that a person sees in it; in a folder, patterns say what is read."""

import gzip
import io
import json
import os
import zipfile
from urllib.parse import quote

import pytest

from hf_blend.errors import ConfigError
from hf_blend.evaluation.documents import Corpus
from hf_blend.evaluation.folder_files import FileFilter
from hf_blend.evaluation.parsing import FileLimits

for package in ("bs4", "charset_normalizer", "markdownify", "pathspec"):
    pytest.importorskip(package, reason="the extra rag is not installed: pip install hf-blend[rag]")


def zipped(files: dict[str, str | bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


def word(body: str, **parts: str) -> bytes:
    """A Word document."""
    document = f'<?xml version="1.0"?><w:document xmlns:w="w"><w:body>{body}</w:body></w:document>'
    return zipped({"word/document.xml": document, **{f"word/{name}.xml": text for name, text in parts.items()}})


def book(chapters: dict[str, str], spine: str, entities: str = "") -> bytes:
    """An EPUB whose spine names chapters by their ids, which are their names without spaces and the ending."""
    items = "".join(
        f'<item id="{name.split(".")[0].replace(" ", "")}" href="text/{quote(name)}" '
        f'media-type="{"image/svg+xml" if name.endswith("svg") else "application/xhtml+xml"}"/>'
        for name in chapters
    )
    references = "".join(f'<itemref idref="{identifier}"/>' for identifier in spine.split())
    return zipped({
        "META-INF/container.xml": '<container><rootfile full-path="OEBPS/book.opf"/></container>',
        "OEBPS/book.opf": f"{entities}<package><manifest>{items}</manifest><spine>{references}</spine></package>",
        **{f"OEBPS/text/{name}": text for name, text in chapters.items()},
    })  # fmt: skip


PARAGRAPHS = (
    '<w:p><w:pPr><w:pStyle w:val="Heading2"/></w:pPr><w:r><w:t>Keepers</w:t></w:r></w:p>'
    '<w:p><w:r><w:t xml:space="preserve">Mara keeps </w:t></w:r><w:r><w:t>the light.</w:t></w:r>'
    "<w:r><w:instrText>PAGE</w:instrText><w:delText>gone</w:delText></w:r></w:p>"
    "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>boat</w:t></w:r></w:p></w:tc>"
    "<w:tc><w:p><w:r><w:t>12</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
)
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# Tides\n", "High at six."]},
        {"cell_type": "code", "source": "print(2)", "outputs": [{"text": ["2\n"]}, {"data": {"text/plain": "3"}}]},
        {"cell_type": "code", "source": [], "outputs": []},
    ]
}
CHAPTERS = {
    "two.xhtml": "<body><h1>Two</h1></body>", "one.xhtml": "<body><p>One</p></body>", "cover.svg": "<svg>title</svg>",
    "a b.xhtml": "<body><p>Three</p></body>",
}  # fmt: skip
FOOTNOTES = '<w:footnotes xmlns:w="w"><w:p><w:r><w:t>a note</w:t></w:r></w:p></w:footnotes>'
GERMAN = "Größe der Flöße, geprüft für die Hafenbehörde. Über die Brücke führt ein schöner Weg."
FRENCH = "Il était une fois un très vieux gardien qui vivait là-bas, près de la forêt. Où êtes-vous allé?"
FORMATS = {  # file → content and text
    "a.csv": (b'name,age\r\nMara,"4, or 5"\r\nTomas,\r\n', "name, age\nname: Mara; age: 4, or 5\nname: Tomas\n"),
    "semicolons.csv": (b"name;place\nMara;light, north\n", "name, place\nname: Mara; place: light, north\n"),
    "no names.csv": (b"1,2\n3,4\n", "1,2\n3,4\n"),
    "a.tsv": (b"name\tage\nMara\t4\textra\n", "name, age\nname: Mara; age: 4; extra\n"),
    "inches.tsv": (
        b'name\tsize\npipe\t3"\n"bolt\t4\nnut\t5\n',
        'name, size\nname: pipe; size: 3"\nname: "bolt; size: 4\nname: nut; size: 5\n',
    ),
    "tabs.tsv": (b'name\tsize\n"a ""pipe"""\t"3\t4"\n', 'name, size\nname: a "pipe"; size: 3\t4\n'),
    "open.csv": (b'name,age\nMara,"4\nTomas,5\n', 'name,age\nMara,"4\nTomas,5\n'),
    "field.csv": (b"a,b\n" + b"x" * 200_000, "a,b\n" + "x" * 200_000),
    "a.json": (b'{"keeper": "Jos\\u00e9"}', '{\n "keeper": "José"\n}'),
    "lines.json": (b'{\n  "keeper": 1.10\n}', '{\n  "keeper": 1.10\n}'),
    "comments.json": (b"{} // no JSON", "{} // no JSON"),
    "a.ipynb": (
        json.dumps(NOTEBOOK).encode(),
        "# Tides\nHigh at six.\n\n```\nprint(2)\n```\n\n2\n\n\n3\n\n```\n\n```",
    ),
    "a.docx": (word(PARAGRAPHS), "## Keepers\n\nMara keeps the light.\n\n|  |  |\n| --- | --- |\n| boat | 12 |\n"),
    "notes.docx": (word("<w:p><w:t>Mara</w:t></w:p>", footnotes=FOOTNOTES), "Mara\n\na note\n"),
    "a.epub": (book(CHAPTERS, "cover one two ab"), "One\n\n# Two\n\nThree\n"),
    "a.txt.gz": (gzip.compress(b"Mara"), "Mara"),
    "a.html.gz": (gzip.compress(b"<h1>Mara</h1>"), "# Mara\n"),
    "a.rst": (b"Keepers\n=======\n", "Keepers\n=======\n"),
    "LICENSE": (b"Do as you like.", "Do as you like."),
    "a.c": (b"int main;", "int main;"),
    "déjà.txt": ("déjà vu".encode("cp1252"), "déjà vu"),
    "unit.txt": ("Ångström".encode("cp1252"), "Ångström"),
    "german.txt": (GERMAN.encode("latin-1"), GERMAN),
    "french": (FRENCH.encode("cp1252"), FRENCH),
    "russian.txt": ("Ленинград стоит на реке Неве. Доброе утро".encode("cp1251"),) * 2,
    "japanese.txt": ("灯台の番人はマラです。毎晩ランプを灯します".encode("cp932"),) * 2,
    "windows.txt": ("Größe".encode("utf-16"), "Größe"),
}
TEXTS = {
    "russian.txt": "Ленинград стоит на реке Неве. Доброе утро",
    "japanese.txt": "灯台の番人はマラです。毎晩ランプを灯します",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_becomes_the_text_that_a_person_sees_in_it(name, tmp_path):
    content, text = FORMATS[name]
    (tmp_path / name).write_bytes(content)
    (document,) = Corpus([str(tmp_path)])
    assert document.text == TEXTS.get(name, text)
    assert document.is_markdown == name.removesuffix(".gz").endswith((".ipynb", ".docx", ".epub", ".html"))


def test_a_list_of_documents_in_json_is_read_as_their_lines_are(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one", "title": "First"}, {"chunks": ["two", "three"]}]))
    read = {document.name: document.text for document in Corpus([str(tmp_path / "a.json")])}
    assert read == {"a.json:First": "First\n\none", "a.json:2.1": "two", "a.json:2.2": "three"}


SPACES = b" " * (3 << 20)
LAUGHS = "<!DOCTYPE x [" + "".join(f'<!ENTITY l{n + 1} "{f"&l{n};" * 10}">' for n in range(12)) + "]>"
HOSTILE = {  # file → content and reason, within 1 MB
    "bomb.txt.gz": (gzip.compress(SPACES), "it has more than 1 MB"),
    "bomb.docx": (zipped({"word/document.xml": SPACES}), "it has more than 0.125 MB"),
    "bomb.epub": (book({"a.xhtml": "<p>x</p>" + " " * 100_000}, "a " * 50), "it has more than 0.125 MB"),
    "names.csv": (b"a" * 5000 + b",b\n" + b"x\n" * 5000, "it has more than 1 MB"),
    "cut.txt.gz": (gzip.compress(os.urandom(5000))[:3000], "Compressed file ended"),
    "no.gz": (b"no gzip", "Not a gzipped file"),
    "a.tar.gz": (gzip.compress(b"a.txt\0\0\0"), "it is application/x-tar, not text"),
    "no.docx": (b"no zip", "File is not a zip file"),
    "other.docx": (zipped({"a.xml": ""}), "it has no word/document.xml"),
    "no.epub": (zipped({"META-INF/container.xml": "<container/>"}), "it names no package"),
    "lost.epub": (book({}, "a"), "a"),
    "outside.epub": (book({"../../../../etc/passwd": ""}, ""), "it holds no text"),
    "old.ipynb": (b'{"worksheets": []}', "no notebook of Jupyter's format 4"),
    "cells.ipynb": (b'{"cells": [5]}', "no notebook of Jupyter's format 4"),
    "deep.docx": (word("<w:p>" * 3000 + "<w:t>x"), "it is nested too deeply"),
    "noise": (bytes(range(128, 256)) * 9, "it is not UTF-8 (byte 0), and no other encoding fits"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_left_out_with_its_reason_and_others_are_read(name, tmp_path):
    content, reason = HOSTILE[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    corpus = Corpus([str(tmp_path)], limits=FileLimits(megabytes=1))
    assert [document.text for document in corpus] == ["good"]
    ((_, given),) = corpus.left_out
    assert reason in given


def test_entities_of_xml_are_not_expanded(tmp_path):
    (tmp_path / "a.epub").write_bytes(book({"a.xhtml": f"{LAUGHS}<p>good &l9;</p>"}, "a", LAUGHS))
    (tmp_path / "b.docx").write_bytes(word(f"{LAUGHS}<w:p><w:t>good &l9;</w:t></w:p>"))
    for document in Corpus([str(tmp_path)]):
        assert "good &l9" in document.text
        assert len(document.text) < 3000


@pytest.fixture
def repository(tmp_path):
    files = {
        "a.md": "", "b.txt": "", "sub/c.md": "", "sub/deep/d.log": "", "sub/keep.log": "", "build/e.txt": "",
        "node_modules/f.js": "", "sub/__pycache__/g.txt": "", ".hidden/h.txt": "", "node_modules/.gitignore": "*",
        ".gitignore": "build/\n*.log\n!\n# no pattern\n", "sub/.gitignore": "!keep.log\n",
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "repo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or "text")
    return tmp_path / "repo"


def names_in(folder, **patterns):
    corpus = Corpus([str(folder)], file_filter=FileFilter(**patterns))
    return {document.name.removeprefix("repo/") for document in corpus}, dict(corpus.left_out)


def test_a_folder_is_read_without_what_its_gitignore_files_and_programs_leave_out(repository):
    read, left_out = names_in(repository)
    assert read == {"a.md", "b.txt", "sub/c.md", "sub/keep.log"}
    assert left_out == {
        "repo/.gitignore": "hidden",
        "repo/sub/.gitignore": "hidden",
        "repo/.hidden/h.txt": "hidden",
        "repo/build/e.txt": "in .gitignore",
        "repo/sub/deep/d.log": "in .gitignore",
        "repo/node_modules/f.js": "in node_modules",
        "repo/node_modules/.gitignore": "in node_modules",
        "repo/sub/__pycache__/g.txt": "in __pycache__",
    }


GITIGNORES = {  # rules by folder, and what git does not ignore of the files below
    "below an ignored folder": ({"": "sub/\n!sub/c.md\n"}, {"a.md", "b.txt", "build/e.txt"}),
    "in a folder of an ignored one": (
        {"": "deep/\n", "sub/deep": "!d.txt\n"},
        {"a.md", "b.txt", "build/e.txt", "sub/c.md"},
    ),
    "a folder beside ignored files": ({"": "sub/*\n!sub/deep/\n"}, {"a.md", "b.txt", "build/e.txt", "sub/deep/d.txt"}),
    "all but some": ({"": "*\n!*/\n!*.md\n"}, {"a.md", "sub/c.md"}),
    "what is in a folder": ({"": "sub/**\n", "sub": "!c.md\n"}, {"a.md", "b.txt", "build/e.txt", "sub/c.md"}),
    "a folder that is included, not its files": (
        {"": "*.md\n", "sub": "!/\n!deep/\n"},
        {"b.txt", "build/e.txt", "sub/deep/d.txt"},
    ),
}


@pytest.mark.parametrize("name", GITIGNORES)
def test_gitignore_files_say_what_they_say_to_git(name, tmp_path):
    rules, read = GITIGNORES[name]
    for file in ("a.md", "b.txt", "build/e.txt", "sub/c.md", "sub/deep/d.txt"):
        path = tmp_path / "repo" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    for folder, lines in rules.items():
        (tmp_path / "repo" / folder / ".gitignore").write_text(lines)
    assert names_in(tmp_path / "repo")[0] == read


@pytest.mark.parametrize(
    ("patterns", "read"),
    [
        ({"include": ("*.md",)}, {"a.md", "sub/c.md"}),
        ({"include": ("*.md", "/b.txt"), "exclude": ("sub/",)}, {"a.md", "b.txt"}),
        ({"exclude": ("**/*.md",)}, {"b.txt", "sub/keep.log"}),
    ],
)
def test_patterns_choose_files_and_what_they_leave_out_is_named(patterns, read, repository):
    names, left_out = names_in(repository, **patterns)
    assert names == read
    assert {*names, *(name.removeprefix("repo/") for name in left_out)} == {
        str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()
    }


def test_what_is_no_pattern_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match=r"\['!'\] are no patterns"):
        FileFilter(include=("!",))


def test_a_gitignore_that_takes_too_long_is_too_long_or_leads_elsewhere_leaves_nothing_out_and_is_named(tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / ("a" * 200)).write_text("text")
    (folder / ".gitignore").write_text("*a" * 40 + "b")
    corpus = Corpus([str(folder)], limits=FileLimits(seconds=2))
    assert [document.text for document in corpus] == ["text"]
    assert dict(corpus.left_out)["the patterns of .gitignore in repo"] == "it takes more than 2 s, see --file-seconds"
    (folder / ".gitignore").write_text("*\n" + "#" * (1 << 20))
    read, left_out = names_in(folder)
    assert read == {"a" * 200}
    assert left_out["the patterns of repo/.gitignore"] == "it has more than 1 MB"
    (folder / ".gitignore").unlink()
    (folder / ".gitignore").symlink_to("/etc/passwd")
    assert names_in(folder)[1]["the patterns of repo/.gitignore"] == "Too many levels of symbolic links"


def test_a_command_takes_patterns(repository, run):
    code, out, err = run("index", repository, "--include", "*.md", "--exclude", "/a.md", "--dry-run", "--json")
    assert code == 0, err
    reasons = {row["name"]: row["reason"] for row in json.loads(out)["left_out"]}
    assert reasons["repo/b.txt"] == "not in --include"
    assert reasons["repo/a.md"] == "in --exclude"
    assert "1 documents in 1 chunks" in err


def test_inspect_takes_what_index_takes_for_files(tmp_path, run):
    (tmp_path / "large.txt").write_text("Mara keeps the light. " * 100_000)
    ways = ("--file-megabytes", 1, "--file-seconds", 30, "--include", "*.txt", "--exclude", "none", "--verbose")
    code, _, err = run("inspect", "Who keeps the light?", tmp_path, *ways)
    assert code == 2
    assert "it has more than 1 MB, see --file-megabytes" in " ".join(err.split())
