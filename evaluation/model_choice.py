# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The model of those who name none: the largest on this machine that chats, blends, and leaves memory for prompts and
patience to people.

Looked through are the hub's cache and what was converted, or the folder that `HF_BLEND_MODELS` names alone. Nothing is
fetched, and no code that comes with a model is run. What cannot be read is passed over.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_blend.errors import HfBlendError, UnsupportedModelError
from hf_blend.model_names import PACKAGED, converted_models
from hf_blend.store.memory import available_bytes

from .bundled import AUTO, REAL, ModelSource, choose_device, choose_dtype, first_line, open_model, size_of
from .cache_size import cache_size
from .parsing import printable
from .retrieving import Piece

FOLDER = "HF_BLEND_MODELS"  # the variable; empty, nothing is looked for
Check = Callable[[Any], object] | None  # raises for an empty model that is not taken
MEMORY_SHARE = 0.5  # of what is free: weights may take so much, and K and V of a prompt so much of the rest
INSTRUCTED = re.compile("instruct|chat|-it$", re.IGNORECASE)  # names of models that were taught to answer
PARAMETERS_PER_CORE = 0.35e9  # of a CPU; a larger model answers, but so late that nobody waits
TOP_K = {0.3e9: 3, 1e9: 4, 3e9: 6, math.inf: 8}  # parameters below → passages that a model answers from
POSITIONS_SHARE = 0.8  # of the positions are for passages, the rest for the question and what is around it
FIRST_TRY = (
    f"{REAL} is for a first try and often answers wrongly: `hf download Qwen/Qwen2.5-1.5B-Instruct` brings a better "
    "model into the hub's cache, which is then taken by itself."
)
REFUSED = frozenset(  # causal types that were not found to blend, as benchmarks/results/families.json has them
    """
    bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small blt camembert cpmant ctrl
    data2vec-text deepseek_v4 electra ernie falcon_mamba gemma3n gemma4_assistant gemma4_unified_assistant git gpt-sw3
    gpt2 gpt_bigcode gpt_neo hrm_text hunyuan_v1_dense hunyuan_v1_moe inkling2_text inkling_text longcat_flash mamba
    mamba2 marian mbart megatron-bert mllama musicgen musicgen_melody mvp openai-gpt opt pegasus plbart prophetnet
    recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv trocr whisper xglm xlm
    xlm-roberta xlm-roberta-xl xlnet xlstm xmod zaya
    """.split()
)


@dataclass(frozen=True)
class ModelChoice:
    """The model that was taken, without its weights; `reason` says why, and `skipped` what was passed over."""

    source: ModelSource
    reason: str
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A folder with a model that could be taken; `nbytes` are those of its weights as they are loaded."""

    name: str
    folder: Path
    origin: str
    parameters: int
    nbytes: int

    @property
    def rank(self) -> tuple[int, bool, str]:
        """What candidates are sorted by, the best first."""
        return -self.parameters, INSTRUCTED.search(self.name) is None, self.name


def choose_model(
    device: str = AUTO, dtype: str = AUTO, most_parameters: float = math.inf, weights: str = AUTO, check: Check = None
) -> ModelChoice:
    """Choose and open the best model that is here; `smollm2` where there is none. `check(model)` may refuse others.

    Raises:
        MissingExtraError: there is none, and `smollm2` is not here either.
    """
    place = choose_device(device)
    free_bytes = _free_bytes(place)
    if place.type == "cpu":
        most_parameters = min(most_parameters, PARAMETERS_PER_CORE * (os.cpu_count() or 1))
    candidates, skipped = _candidates(choose_dtype(dtype))
    for candidate in sorted(candidates, key=lambda candidate: candidate.rank):
        size = f"{candidate.nbytes / 1e9:.2g} of {free_bytes / 1e9:.2g} GB free"
        if candidate.nbytes > MEMORY_SHARE * free_bytes or candidate.parameters > most_parameters:
            skipped.append(f"{candidate.name}: {size_of(candidate.parameters)}, {size}, is too large")
            continue
        try:
            source = open_model(candidate.name, device, dtype, weights, str(candidate.folder))
            if check is not None:
                check(source.empty)
        except HfBlendError as error:
            skipped.append(f"{candidate.name}: {first_line(error)}")
            continue
        told = f"{candidate.name} from {candidate.origin}, {size}; --model names another."
        return ModelChoice(source, f"{told} {FIRST_TRY}" if candidate.name == REAL else told, tuple(skipped))
    return ModelChoice(open_model(REAL, device, dtype, weights), FIRST_TRY, tuple(skipped))


def choose_top_k(source: ModelSource, pieces: Sequence[Piece], max_new_tokens: int) -> int:
    """How many pieces of documents a model answers from: by its size, and by the room that it and the memory have."""
    size = next(top_k for most, top_k in TOP_K.items() if source.parameters < most)
    longest = max((len(piece.ids) for piece in pieces), default=1)
    positions = math.inf if source.positions is None else POSITIONS_SHARE * (source.positions - max_new_tokens)
    room = min(positions, _memory_tokens(source))
    return max(1, int(min(size, room / longest)))


def _memory_tokens(source: ModelSource) -> float:
    """Tokens whose K and V have room beside the weights."""
    dtype = source.dtype if isinstance(source.dtype, torch.dtype) else None
    try:
        cache = cache_size(source.config, context_tokens=1, dtype=dtype)
    except UnsupportedModelError:  # it keeps another state, which does not grow like this
        return math.inf
    left = _free_bytes(source.device) - source.parameters * cache.dtype.itemsize
    return MEMORY_SHARE * left / max(1, cache.bytes_per_token)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()


def _candidates(dtype: torch.dtype | str) -> tuple[list[Candidate], list[str]]:
    """What could be taken, and a line for each model that could not."""
    candidates, skipped = list[Candidate](), list[str]()
    for name, folder, origin in _folders(skipped):
        try:
            complaint = _complaint(folder)
            if not complaint:
                parameters, nbytes = _weights(folder)
                nbytes = parameters * dtype.itemsize if isinstance(dtype, torch.dtype) else nbytes
                candidates.append(Candidate(printable(name), folder, origin, parameters, nbytes))
        except Exception as error:  # whatever is wrong with what others left there
            complaint = first_line(error)
        if complaint:
            skipped.append(printable(f"{name}: {complaint}"))
    return candidates, skipped


def _folders(skipped: list[str]) -> Iterator[tuple[str, Path, str]]:
    """The name, the folder and the origin of each model that may be here."""
    own = os.environ.get(FOLDER)
    if own is None:
        yield from _cached(skipped)
        yield from ((_short(name), folder, "the converted models") for name, folder in converted_models().items())
    elif own:
        root = Path(own).expanduser()
        for config in sorted(path for depth in ("*", "*/*") for path in root.glob(f"{depth}/config.json")):
            yield str(config.parent.relative_to(root)), config.parent, str(root)


def _cached(skipped: list[str]) -> Iterator[tuple[str, Path, str]]:
    """Models in the hub's cache, at their main revision or else the newest."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError, ValueError):
        return
    skipped += [first_line(warning) for warning in cache.warnings]
    for repository in cache.repos:
        revisions = sorted(repository.revisions, key=lambda made: ("main" in made.refs, made.last_modified))
        if repository.repo_type == "model" and revisions:
            yield _short(repository.repo_id), revisions[-1].snapshot_path, "the hub's cache"


def _short(name: str) -> str:
    """The name that a model is called by here."""
    ids = {label: packaged.hub_id for label, packaged in PACKAGED.items()}
    return next((label for label, hub_id in ids.items() if name in (hub_id, hub_id.partition("/")[2])), name)


def _complaint(folder: Path) -> str:
    """Why a model is not taken, from its small files alone; empty if it may be."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if odd := [path.name for path in folder.iterdir() if path.exists() and not (path.is_file() or path.is_dir())]:
        return f"{odd[0]} is no regular file."
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = config.get("model_type")
    if kind not in CAUSAL or not {*(config.get("architectures") or ())} & {*CAUSAL.values()}:
        return f"it is no causal language model ({kind})."
    if kind in REFUSED:
        return f"models of the type {kind} do not blend."
    if "quantization_config" in config:
        return "it was saved quantised."
    if (folder / "modules.json").exists():
        return "it embeds text."
    return "" if _has_chat_template(folder) else "it has no chat template."


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    return bool(settings.get("chat_template"))


def _weights(folder: Path) -> tuple[int, int]:
    """Parameters and bytes of a model's weights, from the headers of its files; all must be there and whole."""
    from safetensors import safe_open

    index, parameters, nbytes = folder / "model.safetensors.index.json", 0, 0
    names = {"model.safetensors"}
    if index.is_file():
        names = {*json.loads(index.read_text("utf-8"))["weight_map"].values()}
    for name in names:
        with safe_open(folder / name, "pt") as file:
            parameters += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        nbytes += (folder / name).stat().st_size
    return parameters, nbytes
