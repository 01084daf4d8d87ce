# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Run vLLM on the CPU in a process of its own, and give it batches of requests: `python engine.py job.json out.json`.

A job has `model`, `extra` (the connector's settings; none without it), `caching`, and `steps`. A step is a batch of
requests (`ids`, and where they are given `documents`, `tenant`, `salt`), or the name of what happens to the store.
"""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip

NEW_TOKENS = 12


def make_engine(job: dict[str, Any]) -> Any:
    """Make an engine, with the connector if the job has settings for it."""
    from vllm import LLM

    transfer = {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "hf_blend.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": job["extra"],
    }
    return LLM(
        model=job["model"], dtype="float32", enforce_eager=True, max_model_len=4096, seed=0,
        enable_prefix_caching=job["caching"],
        kv_transfer_config=None if job["extra"] is None else transfer,
    )  # fmt: skip


def answer(engine: Any, requests: list[dict[str, Any]], new_tokens: int = NEW_TOKENS) -> list[dict[str, Any]]:
    """Let the engine answer a batch of requests."""
    from vllm import SamplingParams

    prompts = []
    settings = []
    for request in requests:
        prompt = {"prompt_token_ids": request["ids"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        params = {name: request[name] for name in ("documents", "tenant") if request.get(name)}
        extra = {"kv_transfer_params": params} if params else None
        prompts.append(prompt)
        settings.append(SamplingParams(max_tokens=new_tokens, temperature=0, logprobs=2, extra_args=extra))
    answers = []
    for output in engine.generate(prompts, settings, use_tqdm=False):
        completion = output.outputs[0]
        gaps = []
        for step in completion.logprobs:
            best, second = sorted((token.logprob for token in step.values()), reverse=True)[:2]
            gaps.append(best - second)
        answers.append(
            {
                "tokens": list(completion.token_ids),
                "gaps": gaps,
                "cached": output.num_cached_tokens,
                "finish": completion.finish_reason,
            }
        )
    return answers


def not_shared(engine: Any) -> list[str]:
    """The parameters of the connector's model that are not in memory of vLLM's."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    storages = {parameter.untyped_storage().data_ptr() for parameter in runner.get_model().parameters()}
    copies = []
    for name, parameter in get_kv_transfer_group().model.named_parameters():
        if parameter.untyped_storage().data_ptr() not in storages:
            copies.append(name)
    return copies


def break_model() -> None:
    """Let every forward of the connector's model fail."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory is left")

    get_kv_transfer_group().model.model.layers[2].mlp.forward = fail


def damage(store: Path) -> None:
    """Flip a byte in the middle of every entry."""
    for path in store.rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0xFF]))


def fill(store: Path) -> None:
    """Leave no room on the device of a store."""
    with (store / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def main() -> None:
    """Do a job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    engine = make_engine(job)
    steps = []
    for step in job["steps"]:
        if step == "damage":
            damage(Path(job["extra"]["store"]))
        elif step == "remove":
            shutil.rmtree(Path(job["extra"]["store"]) / "objects")
        elif step == "fill":
            fill(Path(job["extra"]["store"]))
        elif step == "lose":
            remote = Path(job["extra"]["remote"].removeprefix("file://"))
            remote.rename(remote.with_suffix(".gone"))
            remote.touch()  # nothing can be made behind a file
        elif step == "break":
            break_model()
        else:
            steps.append(answer(engine, step))
    unshared = [] if job["extra"] is None else not_shared(engine)
    out.write_text(json.dumps({"steps": steps, "not_shared": unshared}))


if __name__ == "__main__":
    main()
