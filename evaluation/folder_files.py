# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder are read, and why the others are left out. Patterns are those of `.gitignore`."""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from hf_blend.errors import ConfigError, import_extra

GITIGNORE = ".gitignore"
GITIGNORE_BYTES = 1 << 20
MADE_FOLDERS = ("node_modules", "__pycache__")  # what programs put into folders of people


@dataclass(frozen=True)
class FileFilter:
    """Files of folders that a user wants: those that a pattern of `include` matches, if any, and none of `exclude`."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for lines in filter(None, (self.include, self.exclude)):
            try:
                _patterns(lines)
            except ValueError as error:
                raise ConfigError(f"{list(lines)} are no patterns of {GITIGNORE}: {error}. Correct them.") from error

    def reason(self, file: str) -> str:
        """Why a file is left out, given its path from the folder on; empty if it is not."""
        if self.include and not _patterns(self.include).match_file(file):
            return "not in --include"
        if self.exclude and _patterns(self.exclude).match_file(file):
            return "in --exclude"
        return ""


ALL_FILES = FileFilter()


@dataclass
class Folder:
    """A folder of documents; `left_out` has the names and reasons of the files that are not read.

    `match_rules` says which files the rules of `.gitignore` files leave out, as `ignored_files` does, within a time.
    """

    path: Path
    file_filter: FileFilter
    match_rules: Callable[[dict[str, list[str]], Sequence[str]], list[bool]]
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = Path(os.path.realpath(self.path))

    def name_of(self, file: str) -> str:
        """The name of a file for people: with its folder's."""
        return f"{self.root.name}/{file}"

    def files(self) -> list[str]:
        """List the files to read, by their paths from the folder on."""
        paths = {str(path.relative_to(self.root)): path for path in _entries(self.root)}
        reasons = {file: self._reason(file, path) for file, path in paths.items()}
        files = [file for file, reason in reasons.items() if not reason]
        gitignores = [file for file in paths if os.path.basename(file) == GITIGNORE]
        ignored = self._ignored(files, [file for file in gitignores if not _skipped(Path(file).parent.parts)])
        for file, is_ignored in zip(files, ignored, strict=True):
            reasons[file] = f"in {GITIGNORE}" if is_ignored else self.file_filter.reason(file)
        self.left_out += [(self.name_of(file), reason) for file, reason in reasons.items() if reason]
        return [file for file in files if not reasons[file]]

    def _reason(self, file: str, path: Path) -> str:
        """Why something in the folder is not read, whatever the user wants."""
        if reason := _skipped(Path(file).parts):
            return reason
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(self.root):
            return "a link out of the folder"
        if reason := _skipped(target.relative_to(self.root).parts):
            return reason
        return "" if os.path.isfile(target) else _why_no_file(path)

    def _ignored(self, files: Sequence[str], gitignores: Sequence[str]) -> list[bool]:
        """Say which files the folder's `.gitignore` files leave out; one that cannot be used leaves out nothing."""
        rules = {}
        for file in gitignores:
            try:
                rules[str(Path(file).parent)] = _read_rules(self.root / file)
            except (OSError, ValueError) as error:
                self.left_out.append((f"the patterns of {self.name_of(file)}", _message(error)))
        try:
            return self.match_rules(rules, files) if rules else [False] * len(files)
        except ValueError as error:
            self.left_out.append((f"the patterns of {GITIGNORE} in {self.root.name}", _message(error)))
            return [False] * len(files)


def ignored_files(rules: dict[str, list[str]], files: Iterable[str]) -> list[bool]:
    """Say which files are ignored by rules of folders, of which the deepest that says something decides.

    Below an ignored folder nothing is included again, as in git.
    """
    patterns = {folder: _patterns(tuple(filter(_is_pattern, lines))).patterns for folder, lines in rules.items()}
    is_ignored = cache(partial(_is_ignored, patterns))
    return [
        any(is_ignored(f"{folder}/") for folder in [*Path(file).parents][-2::-1]) or is_ignored(file) for file in files
    ]


def _is_ignored(patterns: dict[str, Sequence[Any]], path: str) -> bool:
    """Whether a file, or a folder with a slash behind it, is ignored itself."""
    for folder in map(str, Path(path).parents):
        name = path if folder == "." else path[len(folder) + 1 :]
        for pattern in reversed(patterns.get(folder, ())):
            if pattern.include is not None and any(_is_whole(match, name) for match in pattern.regex.finditer(name)):
                return bool(pattern.include)
    return False


def _is_whole(match: Any, name: str) -> bool:
    """Whether a pattern matched a path itself, not a folder above it, whose end pathspec calls `ps_d`.

    `a/**` is what is in a folder, but not the folder.
    """
    if match.groupdict().get("ps_d") is None:
        return not name.endswith("/") or match.end() < len(name)
    return bool(match.start("ps_d") == len(name) - 1)


@cache
def _patterns(lines: tuple[str, ...]) -> Any:
    pathspec = import_extra("pathspec", extra="rag", wanted_by=f"--include, --exclude or a {GITIGNORE}")
    return pathspec.GitIgnoreSpec.from_lines(lines)


def _is_pattern(line: str) -> bool:
    try:
        _patterns((line,))
    except ValueError:
        return False
    return True


def _skipped(components: Iterable[str]) -> str:
    """Why a path is not read for one of its components; empty if it may be."""
    for name in components:
        if name in MADE_FOLDERS:
            return f"in {name}"
        if name.startswith("."):
            return "hidden"
    return ""


def _read_rules(path: Path) -> list[str]:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        content = file.read(GITIGNORE_BYTES + 1) or b""
    if len(content) > GITIGNORE_BYTES:
        raise ValueError(f"it has more than {GITIGNORE_BYTES >> 20} MB")
    return content.decode(errors="surrogateescape").splitlines()


def _message(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _why_no_file(path: Path) -> str:
    """Why something in a folder cannot be read as a file."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            return f"it cannot be read: {error.strerror}"
    if not path.is_symlink():
        return "no file that can be read"
    return "a link to a folder" if path.is_dir() else "a link to no file"


def _entries(root: Path) -> list[Path]:
    """List all that is in a folder and in its folders, which are not listed themselves unless they cannot be read."""
    files, folders = list[Path](), [root]
    for folder in folders:  # which grows meanwhile: os.walk calls itself in Python 3.11, and folders may be deep
        try:
            for entry in list(os.scandir(folder)):
                (folders if entry.is_dir(follow_symlinks=False) else files).append(Path(entry))
        except OSError:
            files.append(folder)
    return sorted(files)
