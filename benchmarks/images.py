# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a prompt with several images costs when their chunks are stored: time to the first token, beside stock.

    python benchmarks/images.py --output benchmarks/results/images.json

Random weights in the proportions of two families: a tower that costs more than the text model (`qwen2_vl`, as in its
2B release), and one that costs next to nothing (`llava`). The images come in another order in every round. Methods
run in turns in one process; ratios are medians over the rounds. It says nothing about answers: weights are random.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.version import __version__

IMAGE, START, END, VIDEO, WORDS = 250, 251, 252, 253, 16
SIZES = {  # text layers, width; tower layers, width; patches along a side
    "measured": {"layers": 8, "width": 512, "tower_layers": 8, "tower_width": 320, "side": 28},
    "tiny": {"layers": 2, "width": 32, "tower_layers": 1, "tower_width": 32, "side": 4},
}


def config_of(family: str, size: dict[str, int]) -> Any:
    """The config of a small model of a family.

    Args:
        family: "qwen2_vl" or "llava".
        size: one of `SIZES`.
    """
    width, tower = size["width"], size["tower_width"]
    text = {
        "vocab_size": 256, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": size["layers"],
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192, "bos_token_id": 0,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if family == "llava":
        eye = {
            "model_type": "clip_vision_model", "hidden_size": tower // 4, "intermediate_size": tower,
            "num_hidden_layers": size["tower_layers"], "num_attention_heads": 4, "patch_size": 4,
            "image_size": 4 * size["side"] // 2, "projection_dim": tower,
        }  # fmt: skip
        text |= {"model_type": "llama"}
        return AutoConfig.for_model(
            "llava", text_config=text, vision_config=eye, image_token_index=IMAGE, vision_feature_layer=-1
        )
    sections = [width // 64, 3 * width // 128, 3 * width // 128] if width > 64 else [0, 1, 1]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    text |= {"model_type": "qwen2_vl_text", "rope_parameters": rope}
    eye = {
        "depth": size["tower_layers"], "embed_dim": tower, "hidden_size": width, "num_heads": 4, "mlp_ratio": 4,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1,
    }  # fmt: skip
    marks = {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}
    return AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=eye, image_token_id=IMAGE, **marks)


def prompt(family: str, size: dict[str, int], seeds: list[int]) -> dict[str, torch.Tensor]:
    """What a processor would make of a prompt with some images, words between them and a question.

    Args:
        family: as in `config_of`.
        size: one of `SIZES`.
        seeds: of the images, in order.

    Returns:
        Arguments of the model's forward.
    """
    side = size["side"]
    words = torch.randint(5, 250, (len(seeds) + 1, WORDS), generator=torch.Generator().manual_seed(0)).tolist()
    ids = [0, *words[0]]
    for text in words[1:]:
        ids += [START, *[IMAGE] * (side // 2) ** 2, END, *text]
    shape = (side * side, 48) if family == "qwen2_vl" else (1, 3, 2 * side, 2 * side)
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    given = {"input_ids": torch.tensor([ids]), "pixel_values": torch.cat(drawn)}
    if family == "qwen2_vl":
        given["image_grid_thw"] = torch.tensor([[1, side, side]] * len(seeds))
        given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).long()
    return given


@torch.no_grad()
def first_token(model: Any, inputs: dict[str, Any], store: ChunkStore | None, settings: dict[str, Any]) -> Any:
    """Time a prefill, from the processor's output to the logits of the last token.

    Args:
        model: the model.
        inputs: as `prompt` gives them.
        store: of the chunks; None: stock.
        settings: of the `BlendCache`.

    Returns:
        Milliseconds, and the cache.
    """
    started = time.perf_counter()
    cache: Any = DynamicCache() if store is None else BlendCache(model, store, **settings)
    given = inputs if store is None else cache.inputs_with_images(**inputs)
    model(**given, past_key_values=cache, logits_to_keep=1, use_cache=True)
    return 1e3 * (time.perf_counter() - started), cache


METHODS: dict[str, dict[str, Any]] = {  # all images stored, but for the last
    "ratio 0.15, image-head": {"recompute_ratio": 0.15, "selector": "image-head"},
    "ratio 0.15, kv-deviation": {"recompute_ratio": 0.15, "selector": "kv-deviation"},
    "ratio 1.0, tower left out": {"recompute_ratio": 1.0},
    "ratio 0.15, nothing stored": {"recompute_ratio": 0.15, "selector": "image-head"},
}


def measure(family: str, size: dict[str, int], images: int, rounds: int) -> list[dict[str, Any]]:
    """Compare stock and stored images, in turns.

    Args:
        family: as in `config_of`.
        size: one of `SIZES`.
        images: in each prompt.
        rounds: of each method.

    Returns:
        For each method the figures of one family.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config_of(family, size), attn_implementation="sdpa").eval()
    store = ChunkStore.open("memory://")
    for settings in METHODS.values():  # what is tested once, and all chunks
        first_token(model, prompt(family, size, list(range(images))), store, settings)
    times: dict[str, list[float]] = {"stock": [], **{name: [] for name in METHODS}}
    charged: dict[str, float] = {}
    for number in range(rounds):
        seeds = [(number + 1 + at) % images for at in range(images)]
        inputs = prompt(family, size, seeds)
        times["stock"].append(first_token(model, inputs, None, {})[0])
        for name, settings in METHODS.items():
            is_new = name.endswith("nothing stored")
            given = prompt(family, size, [100 * (number + 1) + seed for seed in seeds]) if is_new else inputs
            took, cache = first_token(model, given, ChunkStore.open("memory://") if is_new else store, settings)
            times[name].append(took)
            charged[name] = cache.report.charged_budget
    shared = {
        "family": family, "tokens": inputs["input_ids"].shape[1], "stock_ms": statistics.median(times["stock"]),
        "pixel_bytes_per_image": inputs["pixel_values"].nbytes / images,
        "stored_bytes_per_image": sum(one.nbytes for one in store.entries()) / images,
    }  # fmt: skip
    return [
        {
            **shared,
            "method": name,
            "charged_budget": charged[name],
            "times_faster": statistics.median(a / b for a, b in zip(times["stock"], times[name], strict=True)),
        }
        for name in METHODS
    ]


def main(arguments: list[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="measured")
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("images.json"))
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    machine = {
        "device": platform.processor() or "cpu", "threads": given.threads, "dtype": "float32",
        "torch": torch.__version__, "transformers": transformers.__version__, "hf_blend": __version__,
    }  # fmt: skip
    size = SIZES[given.size]
    shape = {**size, "images": given.images, "tokens_per_image": (size["side"] // 2) ** 2, "rounds": given.rounds}
    rows = [row for family in ("qwen2_vl", "llava") for row in measure(family, size, given.images, given.rounds)]
    result = {"machine": machine, "shape": shape, "rows": rows}
    given.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
