# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ask a question over documents, and see what was retrieved."""

from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_blend.errors import ConfigError

from . import options
from .choosing import choose_config
from .output import Json, humanise, interruptible, marked, said_if_slow, say, show
from .reading import COST, load, read_for, say_limits, split

if TYPE_CHECKING:
    from hf_blend import ChunkStore
    from hf_blend.evaluation.asking import Question, Reply
    from hf_blend.prefill.report import BlendReport

__all__ = ["ask"]

QuestionText = Annotated[
    str | None, typer.Argument(metavar="QUESTION", help="The question; without one, bundled ones are asked.")
]
Documents = Annotated[
    list[str] | None,
    typer.Argument(metavar="DOCUMENT", help="Files or folders, of text and of what markitdown reads; - is stdin."),
]
Controller = Annotated[
    bool, typer.Option("--controller", help="Measure, and compute a chunk where that is faster than loading it.")
]
Reorder = Annotated[
    bool, typer.Option("--reorder", help="Store what was healed, and put first what continues what is stored so.")
]
Compare = Annotated[bool, typer.Option("--compare", help="Beside blending, also full prefill and full reuse.")]
Rounds = Annotated[
    int | None, typer.Option(min=1, help="With --compare: times each method is timed, else 3; the median counts.")
]
Tokens = Annotated[bool, typer.Option("--tokens", help="With --compare: show which tokens were recomputed.")]


def ask(
    question: QuestionText = None,
    documents: Documents = None,
    model: options.Model = options.REAL,
    store: options.Store = None,
    top_k: options.TopK = 4,
    ratio: options.Ratio = None,
    selector: options.Selector = None,
    partial: options.Partial = None,
    controller: Controller = False,
    reorder: Reorder = False,
    compare: Compare = False,
    rounds: Rounds = None,
    tokens: Tokens = False,
    chunk_tokens: options.ChunkTokens = 512,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 64,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    allow_unverified: options.Unverified = False,
    json: Json = False,
) -> None:
    """Answer from the chunks of documents that a question is about, and name these.

    What is stored of them is reused, what is not is computed and stored: hf-blend index does so ahead of time.
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
    from hf_blend.evaluation import asking, bundled
    from hf_blend.evaluation.answering import blend_config, build_request
    from hf_blend.evaluation.retrieving import Retriever
    from hf_blend.loading.controller import LoadingController

    blend_config(selector, recompute_ratio=ratio)  # refuses wrong settings before the weights are read
    if (rounds or tokens) and not compare:
        option = "--tokens" if tokens else f"--rounds {rounds}"
        raise ConfigError(f"got {option} without --compare. Methods are timed, and tokens shown, only with it.")
    if reorder and partial is not None:
        raise ConfigError(f"got --reorder with --partial {partial}. Chunks that are loaded in part have no chains.")
    corpus = read_for(question, documents or [])
    source = bundled.open_model(model, device, dtype)
    printer = _Printer(json, compare, tokens, names_questions=question is None)
    prompts: list[Question] = []
    with ChunkStore.open(store, partial=partial) as opened, interruptible(lambda: printer.stopped(len(prompts))):
        # Make the prompts
        if question is None:
            for page in bundled.handbook_questions():
                request = build_request(source.tokenizer, page["chunks"], page["question"], system)
                prompts.append(asking.Question(page["question"], request, documents=tuple(page["chunks"])))
        else:
            retriever = Retriever(split(corpus, source, chunk_tokens), top_k)
            prompts.append(asking.prepare(source, retriever, question.strip(), system, max_new_tokens))
            say_limits(retriever, prompts[0], source)

        # Read the weights, and choose how to blend
        pipeline = asking.Pipeline(load(source, opened), source.tokenizer, opened)
        config = choose_config(pipeline, selector, ratio, allow_unverified)
        if reorder:
            config = replace(config, chains=True)
            prompts = [pipeline.reordered(prompt, system) for prompt in prompts]
        if controller:
            opened.controller = LoadingController(pipeline.model, opened, config)

        # Answer
        methods = asking.methods(config, compare)
        slow = said_if_slow if compare else nullcontext
        for number, prompt in enumerate(prompts, 1):
            step = f"Question {number} of {len(prompts)}: {{}} …"
            if compare:
                with slow(step.format("storing its chunks")):
                    report = pipeline.answer(prompt.request, config, 1).report
                if report is not None:
                    printer.reports.append(report)
            printer.begin(prompt)
            replies = []
            for index, method in enumerate(methods, 1):
                with slow(step.format(f"{method.name}, {index} of {len(methods)}")):
                    replies.append(pipeline.ask(prompt, method, max_new_tokens, printer.stream))
            printer.end(prompt, replies)
            if compare:
                with slow(step.format("timing and comparing the methods")):
                    pipeline.time_again(prompt, replies, rounds or 3)
                    pipeline.diverge(prompt, replies)
            if reorder and (cache := replies[-1].answer.cache):
                cache.heal()
        printer.summarise(opened, corpus.rows())


class _Printer:
    """Prints answers while they come, and a summary at the end."""

    def __init__(self, json: bool, compare: bool, tokens: bool, names_questions: bool) -> None:
        self.reports: list[BlendReport] = []
        self._replies: list[Reply] = []
        self._json = json
        self._compare = compare
        self._tokens = tokens
        self._names_questions = names_questions or compare

    def stream(self, text: str) -> None:
        """Print new text of an answer."""
        if not self._json and not self._compare:
            typer.echo(text, nl=False)

    def begin(self, question: "Question") -> None:
        """Print the question."""
        if self._names_questions and not self._json:
            typer.echo(typer.style(question.name, bold=True))

    def end(self, question: "Question", replies: "list[Reply]") -> None:
        """Print what follows the answers to a question: its sources, and what was cut or decided."""
        from hf_blend.prefill.report import Advice

        self._replies += replies
        reports = [reply.answer.report for reply in replies if reply.answer.report]
        if not self._compare:
            self.reports += reports
        if self._json:
            return
        if self._compare:
            _show_answers(replies, self._tokens)
        else:
            typer.echo()
            say(COST.format(replies[0].answer.ttft_ms / 1e3, **replies[0].answer.cost))
        cut = [reply for reply in replies if reply.answer.is_cut]
        if cut:
            names = ", ".join(reply.method.name for reply in cut)
            say(f"Cut at {len(cut[0].answer.ids)} tokens (--max-new-tokens sets another limit): {names}.")
        for report in reports:
            if report.advice:
                say(f"Controller: {Advice(**report.advice)}")
        if question.sources:
            typer.echo(question.retrieved)
        if self._names_questions:
            typer.echo()

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
        sizes = [entry.nbytes for entry in store.entries()]
        say(
            f"Chunks: {loaded} loaded from the store, {computed} computed (with the text before the documents); "
            f"the store holds {len(sizes)}, {humanise('nbytes', sum(sizes))}."
        )


def _show_answers(replies: "list[Reply]", tokens: bool) -> None:
    """Each answer once, with the methods that gave it; if asked for, the tokens that blending recomputed."""
    methods: dict[str, list[str]] = {}
    for reply in replies:
        methods.setdefault(reply.answer.text, []).append(reply.method.name)
    for text, names in methods.items():
        typer.echo(f"  {', '.join(names)}: {text or '(nothing)'}")
    if tokens:
        typer.echo(f"Recomputed tokens stand out:\n{marked(replies[-1].tokens)}")


def _table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method over all questions; the first is full prefill."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    table = []
    full_ms = 0.0
    for name, group in by_method.items():
        time_ms = median(ms for row in group for ms in row["rounds_ms"])
        full_ms = full_ms or time_ms
        divergences = [row["kl"] for row in group if row["kl"] is not None]
        table.append(
            {
                "method": name,
                "first token": f"{time_ms / 1e3:.2f} s",
                "speed-up": f"{full_ms / time_ms:.1f} x",
                "work": f"{fmean(row['charged_budget'] for row in group):.0%}",
                "KL": f"{fmean(divergences):.2g}" if divergences else "-",
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
