# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ask a question over documents, and see what was retrieved."""

from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_blend.errors import ConfigError
from hf_blend.evaluation.parsing import FileLimits

from . import options
from .calibrating import Calibrate, choose_config
from .choosing import COST, LOOP, open_encoder, open_source
from .output import Json, humanise, interruptible, marked, said_if_slow, say, show
from .reading import choose_files, load, prepare, read_questions

if TYPE_CHECKING:
    from hf_blend import ChunkStore
    from hf_blend.evaluation.asking import Question, Reply
    from hf_blend.prefill.report import BlendReport

__all__ = ["ask"]

Questions = Annotated[
    Path | None, typer.Option(help="File with a question on each line; all arguments are documents then.")
]
Compare = Annotated[bool, typer.Option("--compare", help="Beside blending, also full prefill and full reuse.")]
Rounds = Annotated[int, typer.Option(min=1, help="With --compare: times each method is timed; the median counts.")]
Tokens = Annotated[bool, typer.Option("--tokens", help="With --compare: show which tokens were recomputed.")]


def ask(
    question: options.Question = None,
    documents: options.Documents = None,
    questions: Questions = None,
    model: options.Model = None,
    store: options.Store = None,
    top_k: options.TopK = None,
    meaning: options.Meaning = None,
    ratio: options.Ratio = None,
    selector: options.Selector = None,
    calibrate: Calibrate = False,
    partial: options.Partial = None,
    controller: options.Controller = False,
    compare: Compare = False,
    rounds: Rounds = 1,
    tokens: Tokens = False,
    chunk_tokens: options.IndexedTokens = None,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 256,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    allow_unverified: options.Unverified = False,
    include: options.Include = None,
    exclude: options.Exclude = None,
    file_megabytes: options.FileMegabytes = options.MEGABYTES,
    file_seconds: options.FileSeconds = options.SECONDS,
    verbose: options.Verbose = False,
    json: Json = False,
) -> None:
    """Answer from the pieces of documents that a question is about, and name these.

    What is stored of the pieces is reused, what is not is computed and stored: hf-blend index does so ahead of time.
    --compare prints the first token's time and the KL divergence from full prefill, over the ten first tokens of full
    prefill's answer, beside the answers. Without documents three questions over a bundled handbook are asked.

    Examples:
        hf-blend ask --compare --rounds 2 --store my-chunks  # slow
        hf-blend ask --store my-chunks
        hf-blend ask --store my-chunks --compare --json
        hf-blend ask --store my-chunks --partial 0.25 --json
        hf-blend ask --store my-chunks --controller --json  # slow
        hf-blend ask "Who keeps the light?" notes/ --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation import asking
    from hf_blend.evaluation.answering import blend_config
    from hf_blend.loading.controller import LoadingController

    blend_config(selector, recompute_ratio=ratio)  # refuses wrong settings before the weights are read
    if (rounds > 1 or tokens) and not compare:
        option = "--tokens" if tokens else f"--rounds {rounds}"
        raise ConfigError(f"got {option} without --compare. Methods are timed, and tokens shown, only with it.")
    encoder = open_encoder(meaning, device)
    limits = FileLimits(file_megabytes, file_seconds)
    files = choose_files(include, exclude)
    texts, corpus = read_questions(question, documents or [], questions, limits, files, verbose)
    source = open_source(model, device, dtype, verbose)
    printer = _Printer(json, compare, tokens, is_listed=questions is not None or not texts)
    prompts: list[Question] = []
    with ChunkStore.open(store, partial=partial) as opened, interruptible(lambda: printer.stopped(len(prompts))):
        prompts = prepare(source, texts, corpus, top_k, chunk_tokens, system, max_new_tokens, opened, encoder)
        pipeline = asking.Pipeline(load(source, opened), source.tokenizer, opened)
        config = choose_config(pipeline, selector, ratio, allow_unverified, calibrate)
        opened.controller = LoadingController(pipeline.model, opened, config) if controller else None
        methods, slow = asking.methods(config, compare), said_if_slow if compare else nullcontext
        for number, prompt in enumerate(prompts, 1):
            doing = f"Question {number} of {len(prompts)}: {{}} …"
            with slow(doing.format("storing its chunks")):
                if compare and (report := pipeline.answer(prompt.request, config, 1).report):
                    printer.reports.append(report)
            printer.begin(prompt)
            replies = []
            for place, method in enumerate(methods, 1):
                with slow(doing.format(f"{method.name}, {place} of {len(methods)}")):
                    replies.append(pipeline.ask(prompt, method, max_new_tokens, printer.stream))
            printer.end(prompt, replies)
            if compare:
                with slow(doing.format("timing and comparing the methods")):
                    pipeline.time_again(prompt, replies, rounds)
                    pipeline.diverge(prompt, replies)
        printer.summarise(opened, corpus.left_out)


class _Printer:
    """Prints answers while they come, and a summary at the end."""

    def __init__(self, json: bool, compare: bool, tokens: bool, is_listed: bool) -> None:
        self.reports: list[BlendReport] = []
        self._replies: list[Reply] = []
        self._json, self._compare, self._tokens, self._is_listed = json, compare, tokens, is_listed

    def stream(self, text: str) -> None:
        """Print new text of an answer."""
        if not (self._json or self._compare):
            typer.echo(text, nl=False)

    def begin(self, question: "Question") -> None:
        """Print the question."""
        if (self._is_listed or self._compare) and not self._json:
            typer.echo(typer.style(question.name, bold=True))

    def end(self, question: "Question", replies: "list[Reply]") -> None:
        """Print what follows the answers to a question: sources, and what was cut or decided."""
        from hf_blend.prefill.report import Advice

        self._replies += replies
        self.reports += [reply.answer.report for reply in replies if reply.answer.report and not self._compare]
        if self._json:
            return
        if self._compare:
            _show_answers(replies, self._tokens)
        else:
            typer.echo()
            say(COST.format(replies[0].answer.ttft_ms / 1e3, **replies[0].answer.gain))
        if cut := [reply.row["method"] for reply in replies if reply.answer.is_cut]:
            say(f"Cut at {len(replies[0].answer.ids)} tokens, set --max-new-tokens higher: {', '.join(cut)}.")
        if loops := [reply.row["method"] for reply in replies if reply.answer.is_loop]:
            say(LOOP.format(", ".join(loops)))
        for decided in (reply.answer.report.advice for reply in replies if reply.answer.report):
            if decided:
                say(f"Controller: {Advice(**decided)}")
        retrieved = f"{question.retrieved}\n" if question.sources else ""
        if retrieved or self._is_listed:
            typer.echo(retrieved, nl=self._is_listed)

    def stopped(self, count: int) -> str:
        """Say after Ctrl-C how many of the questions are answered, and what is stored."""
        computed = sum(report.computed_chunks for report in self.reports)
        answered = len({reply.row["question"] for reply in self._replies})
        return (
            f"{answered} of {count} questions are answered; the {computed} chunks computed for them are stored. Run "
            "the same command again: what is stored is loaded."
        )

    def summarise(self, store: "ChunkStore", left_out: list[dict[str, str]]) -> None:
        """Print the table of a comparison, and what the store holds."""
        sizes = [entry.nbytes for entry in store.entries()]
        computed = sum(report.computed_chunks for report in self.reports)
        loaded = sum(report.loaded_chunks for report in self.reports)
        rows = [reply.row for reply in self._replies]
        if self._json:
            chunks = {"computed": computed, "loaded": loaded}
            show({"rows": rows, "chunks": chunks, "left_out": left_out}, as_json=True)
            return
        if self._compare:
            show(_table(rows), header=True)
            say(_how_measured(rows))
        say(
            f"{loaded} chunks loaded from the store, {computed} computed (the text before the documents counts as a "
            f"chunk); the store holds {len(sizes)} chunks, {humanise('nbytes', sum(sizes))}."
        )


def _show_answers(replies: "list[Reply]", tokens: bool) -> None:
    """Each answer once, with the methods that gave it; if asked for, the tokens that blending recomputed."""
    answers = list(dict.fromkeys(reply.row["answer"] for reply in replies))
    for text in answers:
        names = [reply.row["method"] for reply in replies if reply.row["answer"] == text]
        typer.echo(f"  {', '.join(names)}: {text or '(nothing)'}")
    if tokens:
        typer.echo(f"Recomputed tokens stand out:\n{marked(replies[-1].tokens)}")


def _table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method over all questions."""
    times, table = dict[str, float](), list[dict[str, Any]]()
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        times[name] = median(ms for row in own for ms in row["rounds_ms"])
        full_ms = next(iter(times.values()))
        table.append(
            {
                "method": name,
                "first token": f"{times[name] / 1e3:.2f} s",
                "speed-up": f"{full_ms / times[name]:.1f} x",
                "work": f"{fmean(row['charged_budget'] for row in own):.0%}",
                "KL": f"{fmean(divergences):.2g}"
                if (divergences := [row["kl"] for row in own if row["kl"] is not None])
                else "-",
            }
        )
    return table


def _how_measured(rows: list[dict[str, Any]]) -> str:
    """Say how the table was measured."""
    import torch

    from hf_blend.evaluation.asking import FORCED_TOKENS

    questions = len({row["question"] for row in rows})
    measured = sum(len(row["rounds_ms"]) for row in rows if row["method"] == rows[0]["method"])
    return (
        f"First token: median of {measured}, in turns, chunks stored, {torch.get_num_threads()} threads. Work: "
        "as a share of a full prefill. KL: of the next-token distribution from full prefill's, mean over the "
        f"{FORCED_TOKENS} first tokens of its answer, teacher-forced, {questions} questions."
    )
