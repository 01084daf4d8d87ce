# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The command `hf-blend`: finds its commands among the files beside this one, and imports the one that is asked for.

To add a command, add a file. The first line of its docstring is what `hf-blend --help` says; `__all__` names its
functions: one with the file's name is the command itself, others are its sub-commands. A function's docstring is its
help; the indented lines under `Examples:` become its epilog, and a test runs them. An example that ends in `# slow` or
`# network` is run only where that is allowed.
"""

import ast
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from hf_blend.errors import HfBlendError
from hf_blend.version import __version__

from .output import interruptible

HELPERS = {"main", "options", "output", "reading", "choosing"}
EXIT_FAILED, EXIT_USAGE = 1, 2  # a command that ran and failed ends by output.fail
WELCOME = f"""Reuse the KV cache of RAG chunks. Version {__version__}.

\b
Begin without documents, or with your own:
  hf-blend ask --compare
  hf-blend index notes/
  hf-blend ask "Who keeps the light?" notes/

Any option may come from the environment, such as --store of ask from HF_BLEND_ASK_STORE.
"""
STOPPED = "What is stored stays, and no entry is half-written. Run the same command again."
DEBUG = ("--debug", "--traceback")
MOST_LETTERS = 300  # of a message that is not ours
COMPLETION = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # where shells put the words while they complete a line


def commands() -> dict[str, str]:
    """Find the commands without importing them."""
    here = Path(__file__).parent
    files = [path for path in sorted(here.glob("[!_]*.py")) if path.stem not in HELPERS]
    docstrings = {path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in files}
    return {stem.replace("_", "-"): text.partition("\n")[0] for stem, text in docstrings.items()}


def split_examples(docstring: str) -> tuple[str, list[str]]:
    """Take a docstring apart into its help and its examples."""
    text, _, examples = inspect.cleandoc(docstring).partition("\nExamples:\n")
    lines = [line.strip() for line in examples.split("\n\n")[0].splitlines() if line.strip()]
    return text.strip(), lines


def functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Give the commands in a file by the names that users type."""
    return {name.replace("_", "-"): getattr(module, name) for name in module.__all__}


def build(words: Sequence[str] = ()) -> typer.Typer:
    """Put the command line together."""
    app = _group(WELCOME)
    app.callback()(_root)
    for name, line in commands().items():
        if name in words:
            _add(app, name, line)
        else:
            app.command(name, help=line)(lambda: None)
    return app


def main(words: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 ok, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C, 143 by SIGTERM."""
    if words is None and not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers draws bars into pipes too
    converting = logging.getLogger("hf_blend.model_names")  # says what it leaves on the disk
    converting.handlers = [logging.StreamHandler()]
    converting.setLevel(logging.INFO)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # names a kernel that nobody asked for
    typed = list(sys.argv[1:] if words is None else words)
    arguments = [word for word in typed if word not in DEBUG]
    try:
        app = build([*arguments, *(word for name in COMPLETION for word in os.environ.get(name, "").split())])
        command = typer.main.get_command(app)
        _hide_variables(command)
        command(arguments, prog_name="hf-blend", auto_envvar_prefix="HF_BLEND")
    except Exception as error:
        if len(arguments) < len(typed):
            raise
        typer.echo(f"hf-blend: {_sentence(error)}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, HfBlendError | OSError) else EXIT_FAILED)


def _hide_variables(command: Any) -> None:
    """Leave the variable of each option out of the help, which says once how they are named."""
    for option in command.params:
        option.show_envvar = False
    for inner in getattr(command, "commands", {}).values():
        _hide_variables(inner)


def _sentence(error: Exception) -> str:
    """What to print for an error: our own words, or a line of another library's with what to do about it."""
    if isinstance(error, HfBlendError):
        return str(error)
    line = (str(error).strip().splitlines() or [""])[0][:MOST_LETTERS].rstrip(" .")
    if "out of memory" in line.lower() or isinstance(error, MemoryError):
        return f"the memory is full ({line}). Use a smaller model, fewer documents, or --dtype bfloat16."
    if isinstance(error, OSError):
        return f"{line}. Check the path, and who may read and write there."
    return (
        f"an error that has no sentence of its own: {type(error).__name__}: {line}. Run it again with --debug to see "
        "where it comes from, and report it with the output of hf-blend env."
    )


def _group(text: str) -> typer.Typer:
    return typer.Typer(
        help=text,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def _add(app: typer.Typer, name: str, line: str) -> None:
    commands = functions(importlib.import_module(f".{name.replace('-', '_')}", __package__))
    target = app
    if list(commands) != [name]:
        app.add_typer(target := _group(line), name=name)
    for command, function in commands.items():
        text, examples = split_examples(function.__doc__ or "")
        examples = [example.partition("  # ")[0] for example in examples]  # the mark is for the tests
        epilog = "\n  ".join(["\b\nExamples:", *examples]) if examples else None
        target.command(command, help=text, epilog=epilog)(interruptible(STOPPED)(function))


def _versions(is_set: bool) -> None:
    if is_set:
        from .env import versions

        typer.echo("\n".join(f"{name} {version}" for name, version in versions().items()).replace("_", "-", 1))
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_versions, is_eager=True, help="Show the versions that matter.")
    ] = False,
    debug: Annotated[bool, typer.Option(*DEBUG, help="Show where an error came from.")] = False,
) -> None: ...


if __name__ == "__main__":
    main()
