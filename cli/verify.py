# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Check that blending is exact for a model, or for every type."""

import logging
from typing import Annotated, Any

import typer

from .options import Device
from .output import Json, fail, interruptible, progress, say, show

__all__ = ["verify"]

Model = Annotated[
    str | None, typer.Argument(help="A path, a hub id, or, in a checkout, tiny:TYPE for a small random one.")
]
All = Annotated[bool, typer.Option("--all", help="In a checkout: every causal type.")]
Dtype = Annotated[list[str] | None, typer.Option("--dtype", help="float32, bfloat16 or float16; may be repeated.")]
Attention = Annotated[list[str] | None, typer.Option("--attention", help="eager or sdpa; may be repeated.")]
Quick = Annotated[bool, typer.Option("--quick", help="In float32 with sdpa attention alone: a minute, not four.")]
Rungs = Annotated[list[str] | None, typer.Option("--rung", help="Run only this check; may be repeated.")]


def verify(
    model: Model = None,
    every: All = False,
    dtype: Dtype = None,
    attention: Attention = None,
    rung: Rungs = None,
    quick: Quick = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Run the checks of exactness: small claims, each measured on the model.

    Exit code 0: every check holds, or is about something that is refused for the model by name. 1: one fails or the
    model cannot be blended; which and why is said. With --all every type is blended, moved and extended exactly in
    float32, refused with a reason, or not judged, where no tiny model of it can be built; the exit code is 1 if one
    crashed or is wrong without a refusal.

    Examples:
        hf-blend verify tiny:llama --quick --rung ratio_1
        hf-blend verify tiny:qwen3 --rung ratio_1 --json  # slow
        hf-blend verify --all --json  # slow
        hf-blend verify HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend.evaluation.bundled import choose_device
    from hf_blend.verify.runner import ATTENTIONS, Verdict, check_names
    from hf_blend.verify.runner import verify as run_checks

    if (model is None) != every:
        raise typer.BadParameter("Give a model, or --all.")
    if every:
        _verify_all(json)
        return
    if quick:
        dtype = ["float32"]
        attention = ["sdpa"]
    checking = logging.getLogger("hf_blend.verify.runner")  # names each check as it begins
    checking.handlers = [logging.StreamHandler()]
    checking.setLevel(logging.INFO)
    verdict = Verdict(model or "")
    with interruptible(lambda: _until_then("Checks run", len(verdict.checks), [row.name for row in verdict.failed])):
        run_checks(
            verdict.model, dtypes=dtype or ("float32", "bfloat16"), attention=attention or ATTENTIONS, checks=rung,
            device=str(choose_device(device)), verdict=verdict,
        )  # fmt: skip
    document = verdict.to_dict()
    claims = check_names()
    rows = [row | {"detail": row["detail"] or claims[row["name"]]} for row in document["rungs"]]
    show(document if json else rows, as_json=json, title=model, header=True)
    if not verdict.supported:
        fail(f"{model} is not supported: {verdict.reason}")
    say(
        f"{model} is blended exactly: {len(rows) - len(verdict.refused)} of {len(rows)} checks hold, "
        f"{len(verdict.refused)} are about what is refused by name."
    )


def _until_then(what: str, count: int, wrong: list[str]) -> str:
    """Say after Ctrl-C what was checked."""
    outcome = f"of them wrong: {', '.join(wrong)}" if wrong else "none of them wrong"
    return f"{what} until then: {count}, {outcome}. The rest was not checked, so this is no verdict."


def _verify_all(json: bool) -> None:
    from hf_blend.model_names import from_checkout

    families = from_checkout("families")
    types = families.tiny_types()
    rows = list[dict[str, Any]]()

    def broken() -> list[str]:
        return [row["model"] for row in rows if families.broken(row)]

    with interruptible(lambda: _until_then("Model types tried", len(rows), broken())):
        rows.extend(progress(families.verify_types(), "model types", total=len(types)))
    if json:
        show({"models": rows}, as_json=True)
    else:
        exact = sum(row["supported"] for row in rows)
        unknown = sum(not families.judged(row) for row in rows)
        title = f"{exact} model types exact, {len(rows) - exact - unknown} refused, {unknown} not judged"
        show(rows, as_json=False, title=title, header=True)
    if failed := broken():
        fail(f"{len(failed)} model types crashed or are wrong without a refusal: {', '.join(failed)}.")
