# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models to ask, by short name, path or hub id, and the documents that come with the package.

What can be known without the weights is known first: the folder, the type, the tokenizer, the device. A mistake is
answered before anything large is read.
"""

import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_blend.errors import ConfigError, UnsupportedModelError, import_extra, suggest
from hf_blend.model_names import hub_is_reachable, locate
from hf_blend.rotary.base import stretches

REAL = "smollm2"  # the model of those who name none
HANDBOOK = files("hf_blend") / "bundled" / "handbook"
AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = (AUTO, "8bit", "4bit")
NO_CODE = {"trust_remote_code": False}  # else transformers asks at the terminal whether to run a repository's code


@dataclass(frozen=True)
class ModelSource:
    """A model whose weights are not read yet."""

    name: str
    folder: str
    config: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype | str
    is_local_only: bool = False
    quantised: dict[str, Any] = field(default_factory=dict)  # arguments of `from_pretrained` for fewer bits

    @property
    def positions(self) -> int | None:
        """How many tokens a prompt and its answer may have together; None if there is no limit, or none is known."""
        config = self.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None)
        return positions if isinstance(positions, int) and not stretches(config) else None

    def load(self) -> nn.Module:
        """Read the weights."""
        from transformers import AutoModelForCausalLM

        options = {"dtype": self.dtype, "local_files_only": self.is_local_only, **NO_CODE, **self.quantised}
        try:
            model: nn.Module = AutoModelForCausalLM.from_pretrained(self.folder, **options)
        except (OSError, ValueError) as error:
            raise _unreadable(self.name, "weights", error) from error
        if not self.quantised:
            model = model.to(self.device)
        return model.eval()


def open_model(name: str = REAL, device: str = AUTO, dtype: str = AUTO, weights: str = AUTO) -> ModelSource:
    """Find a model, and read its config and tokenizer."""
    on = choose_device(device)
    kind = choose_dtype(dtype)
    folder = os.path.expanduser(locate(name))
    if folder.startswith((".", os.sep)) and not os.path.isdir(folder):
        raise ConfigError(
            f"there is no folder {name!r}. Give a folder that a model was saved in, or the id of one on the hub, such "
            "as HuggingFaceTB/SmolLM2-135M-Instruct."
        )
    is_local_only = not os.path.isdir(folder) and not hub_is_reachable()
    config = _config(folder, name, is_local_only)
    _refuse_non_decoder(config, name)
    quantised = _quantised(weights, config, name, on, kind)
    tokenizer = _tokenizer(folder, name, config, is_local_only)
    return ModelSource(name, folder, config, tokenizer, on, kind, is_local_only, quantised)


def load_model(name: str | None = None, device: str = "cpu", dtype: str = AUTO) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer."""
    source = open_model(name or REAL, device, dtype)
    return source.load(), source.tokenizer


def choose_device(name: str = AUTO) -> torch.device:
    """Find a device by its name."""
    if name == AUTO:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise ConfigError(
            f"the device {name!r} cannot be used: {first_line(error)} Give auto, or one of those found here: "
            f"{', '.join(devices)}."
        ) from error
    return device


def choose_dtype(name: str = AUTO) -> torch.dtype | str:
    """Find a dtype by its name."""
    if name == AUTO:
        return AUTO
    if name not in DTYPES:
        raise ConfigError(f"no dtype named {name!r}. {suggest(name, (AUTO, *DTYPES))}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _quantised(weights: str, config: Any, name: str, device: torch.device, dtype: torch.dtype | str) -> dict[str, Any]:
    """What `from_pretrained` needs to quantise a model; 4 bits are multiplied in the dtype of all else."""
    from transformers import BitsAndBytesConfig

    if weights not in WEIGHTS:
        raise ConfigError(f"no weights named {weights!r}. {suggest(weights, WEIGHTS)}")
    if weights == AUTO:
        return {}
    import_extra("bitsandbytes", extra="quant", needed_by=f"--weights {weights}")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"--weights is {weights}, but {name!r} was saved quantised, and is used so. Leave it out.")
    kind = config.get_text_config(decoder=True).dtype if dtype == AUTO else dtype
    settings = BitsAndBytesConfig(**{f"load_in_{weights}": True}, bnb_4bit_compute_dtype=kind)
    return {"quantization_config": settings, "device_map": {"": device}}


def _config(folder: str, name: str, is_local_only: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=is_local_only, **NO_CODE)
    except (OSError, ValueError) as error:
        if os.path.isdir(folder):
            raise _unreadable(name, "config", error) from error
        near = difflib.get_close_matches(folder, [path for path in os.listdir() if os.path.isdir(path)], n=1)
        meant = f" (but {near[0]!r} is)" if near else ""
        reason = "the hub cannot be reached, and its cache lacks it." if is_local_only else f"hub: {first_line(error)}"
        raise ConfigError(
            f"the model {name!r} cannot be loaded: it is no folder here{meant}; {reason} Give a folder that a model "
            "was saved in, the id of one on the hub, or smollm2."
        ) from error


def _refuse_non_decoder(config: Any, name: str) -> None:
    """Refuse what is known to be no decoder from its config alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        kind = "an encoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "no causal language model"
    else:
        return
    raise UnsupportedModelError(
        f"the model {name!r} is of the type {config.model_type}, {kind}, but a decoder-only language model is "
        "expected: it is the KV cache of its prompt that is reused. Give another, such as "
        "HuggingFaceTB/SmolLM2-135M-Instruct."
    )


def _tokenizer(folder: str, name: str, config: Any, is_local_only: bool) -> Any:
    from transformers import AutoTokenizer

    is_folder = os.path.isdir(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=is_local_only, **NO_CODE)
    except (ImportError, OSError, ValueError) as error:
        reason = "" if is_folder else f"{first_line(error)} "  # of a folder it says nothing that helps
        raise _without_tokenizer(is_folder, name, reason) from error
    names = {"tokenizer.json", *getattr(tokenizer, "vocab_files_names", {}).values()}
    if is_folder and not any(Path(folder, file).exists() for file in names):
        raise _without_tokenizer(is_folder, name, f"None of {', '.join(sorted(names))} is there. ")
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if isinstance(vocabulary, int) and tokenizer.vocab_size > vocabulary:
        raise ConfigError(
            f"the tokenizer of {name!r} has {tokenizer.vocab_size:,} tokens, but its model has embeddings for "
            f"{vocabulary:,}: they do not belong together. Save the model's own tokenizer into the folder."
        )
    return tokenizer


def _without_tokenizer(is_folder: bool, name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the {'folder' if is_folder else 'repository'} {name!r} has no tokenizer that can be loaded. {reason}Save it "
        f"beside the model: AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained({name!r})."
    )


def _unreadable(name: str, what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the {what} of the model {name!r} cannot be read: {first_line(error)} Give a folder that "
        "model.save_pretrained wrote, or the id of a model on the hub."
    )


def first_line(error: BaseException) -> str:
    """The first line of another library's message, ended like a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0][:300].rstrip(' .:')}."


def handbook_questions() -> list[dict[str, Any]]:
    """Three questions over the bundled handbook of a mountain hut, which full prefill of `smollm2` answers."""
    questions: Sequence[dict[str, Any]] = json.loads((HANDBOOK / "questions.json").read_text("utf-8"))
    return [{"chunks": list(handbook_pages().values()), **question} for question in questions]


def handbook_pages() -> dict[str, str]:
    """Return the pages of the handbook in their order, by name, each as it is in prompts."""
    texts = {}
    for page in sorted(HANDBOOK.iterdir(), key=lambda page: page.name):
        if page.name.endswith(".md"):
            texts[f"handbook/{page.name}"] = f"{page.read_text('utf-8').strip()}\n\n"
    return texts
