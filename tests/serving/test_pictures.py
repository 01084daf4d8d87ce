# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Images in messages: each request has the answer that `generate` gives to its own images, and others are refused."""

import base64
import io
from types import SimpleNamespace

import httpx
import pytest
import torch
import transformers
from PIL import Image
from tiny_image_models import KINDS, TEXT
from transformers import (
    AutoProcessor,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from hf_blend import BlendCache, BlendConfig
from hf_blend.cli.serve import _service
from hf_blend.config import default_config
from hf_blend.errors import PromptError
from hf_blend.evaluation.bundled import open_model
from hf_blend.evaluation.pictures import Eyes, resized_pixels
from hf_blend.serving.prompts import PicturePrompt
from hf_blend.serving.wire import Limits
from tests.chat_templates import DOCUMENTS, small_tokenizer
from tests.conftest import slow_but
from tests.image_models import CHUNKS, arguments, build, filled, needs_encoding, picture, prompt
from tests.serving.conftest import generation
from tests.serving.processes import running

pytestmark = needs_encoding

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NEW = 8
TYPES = ("llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "idefics3", "internvl")


def asked(kind):
    """Prompts with other images behind the same ids, with two images, and without one."""
    images = [arguments(kind, CHUNKS[0], picture(kind), *CHUNKS[1:], seeds=(seed,)) for seed in (0, 1)]
    both = arguments(kind, picture(kind), CHUNKS[1], picture(kind), seeds=(1, 0))
    return [*images, {"input_ids": prompt(kind, *CHUNKS)}, both]


def of(inputs):
    """As the engine takes it."""
    given = {name: value for name, value in inputs.items() if name != "input_ids"}
    return PicturePrompt(tuple(inputs["input_ids"][0].tolist()), arguments=given)


def alone(model, store, inputs, **settings):
    """The answer of a lone `BlendCache`, or of stock `generate` where there is no store."""
    cache = None if store is None else BlendCache(model, store, default_config(is_blind=True), **settings)
    given = cache.inputs_with_images(**inputs) if cache is not None else inputs
    output = model.generate(**given, past_key_values=cache, generation_config=generation(max_new_tokens=NEW))
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("kind", slow_but("llava", "qwen3_vl", among=TYPES))
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_each_request_with_images_has_the_answer_of_a_lone_one_and_at_ratio_1_that_of_stock(kind, ratio, bench):
    model, store, prompts = build(kind), filled(kind), asked(kind)
    few = generation(max_new_tokens=NEW)
    with bench.engine(model, store, recompute_ratio=ratio, generation_config=few) as engine:
        # an answer of this glm4v holds the token of images, and is an error if it is computed again
        step, fails = engine._generation_step, [True] * (ratio == 1.0 and kind != "glm4v")

        def failing():
            if fails and len(engine.batch_processor.scheduler.in_step) > 1:
                fails.pop()
                raise RuntimeError("a step fails once; all in it are computed again")
            step()

        engine._generation_step = failing
        names = [engine.add_request(of(one) if len(one) > 1 else one["input_ids"][0].tolist()) for one in prompts]
        got = bench.collected(engine, names)
        assert not fails
        assert engine.paged.blocks_in_use == 0
    assert got == [alone(model, store, one, recompute_ratio=ratio) for one in prompts]
    assert got[0] != got[1] or kind not in ("llava", "qwen3_vl")  # the words of some others hang on text alone
    if ratio == 1.0:
        assert got == [alone(model, None, one) for one in prompts]


def test_a_prefill_with_images_that_fails_is_an_error_and_never_computed_without_them(bench, monkeypatch):
    model, store = build("llava"), filled("llava")
    text = prompt("llava", *CHUNKS)[0].tolist()
    with bench.engine(model, store) as engine:
        monkeypatch.setattr(BlendCache, "inputs_with_images", lambda *_, **__: 1 / 0)
        names = [engine.add_request(of(asked("llava")[0])), engine.add_request(text)]
        found = bench.collect(engine, names)
        assert "division by zero" in found[names[0]].error
        assert found[names[1]].generated_tokens == bench.lone_answer(model, store, text)
        assert engine.paged.blocks_in_use == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model that reads images, with its processor, as from the hub."""
    path, tokenizer = tmp_path_factory.mktemp("llava"), small_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    given = {**KINDS["llava"].config, "image_token_index": tokenizer.convert_tokens_to_ids("<image>")}
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    given["text_config"] = {**TEXT, "model_type": "llama", **size}
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(**given))
    for weight in model.parameters():
        weight.data.mul_(4.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(path)
    eyes = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    sizes = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(eyes, tokenizer, chat_template=TEMPLATE, **sizes).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def source(folder):
    return open_model(folder, "cpu")


@pytest.fixture(scope="module")
def http(source, tmp_path_factory):
    limits, blend = Limits(images=2, pixels=5000), BlendConfig(recompute_ratio=1.0)
    given = {"limits": limits, "blend": blend, "eyes": Eyes(source.processor(), source.config, limits)}
    store = tmp_path_factory.mktemp("store")
    with running((source.load(), source.tokenizer), store, **given) as service, httpx.Client(timeout=60) as opened:
        opened.base_url = service.url
        yield opened


def test_the_command_gives_the_server_the_processor_of_a_model_that_reads_images(source, monkeypatch):
    monkeypatch.setattr("hf_blend.serving.run.make_service", lambda *given: given)
    *_, plan, eyes = _service(source, {"name": "x"}, {"images": 3})
    assert (type(eyes.processor), plan.limits.images) == (LlavaProcessor, 3)


def drawn(colour="red", size=(40, 30)):
    return Image.new("RGB", size, colour)


def url(image, kind="PNG", **more):
    held = io.BytesIO()
    image.save(held, kind, **more)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(held.getvalue()).decode()}"


def seen(*urls):
    """A message with images."""
    before, after = ({"type": "text", "text": text} for text in ("What is it?", "Say."))
    images = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    return [{"role": "user", "content": [before, *images, after]}]


def ask(http, messages, **more):
    given = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": NEW, "ignore_eos": True}
    return http.post("/v1/chat/completions", json={**given, **more})


def test_images_of_messages_between_documents_are_answered_as_by_stock_generate(http, source, folder):
    model, processor = source.load(), AutoProcessor.from_pretrained(folder)
    blue = ["blue"]
    rows = [(["red"], DOCUMENTS), (blue, DOCUMENTS), ([*blue, "red"], []), (blue, DOCUMENTS[::-1])]
    for colours, documents in rows:
        answer = ask(http, seen(*map(url, map(drawn, colours))), documents=documents)
        assert answer.status_code == 200, answer.text
        text = "".join(f"{one.rstrip()}\n\n" for one in documents)
        words = f"<|im_start|>user\n{text}What is it?{'<image>' * len(colours)}Say.<|im_end|>\n<|im_start|>assistant\n"
        inputs = processor(text=words, images=[*map(drawn, colours)], return_tensors="pt", add_special_tokens=False)
        output = alone(model, None, dict(inputs))
        got = answer.json()
        assert got["choices"][0]["message"]["content"] == source.tokenizer.decode(output, skip_special_tokens=True)
        costs = got["usage"]
        assert costs["prompt_tokens"] == inputs["input_ids"].shape[1]
        assert costs["hf_blend"]["prefill"] == "blended"
        assert costs["hf_blend"]["reused_tokens"] > 0


SMALL, HALF = url(drawn(size=(2, 2))), url(drawn(size=(60, 60)))
BAD = {
    "no image": (seen("data:image/png;base64,aGVsbG8="), "cannot be read (UnidentifiedImageError), expected PNG"),
    "no base64": (seen("data:image/png;base64,!!!"), "messages.0 cannot be read (Error)"),
    "network": (seen("https://example.org/a.png"), "'https://example.org/a.png', expected data:image/png;base64"),
    "file": (seen("file:///etc/passwd"), "Nothing is fetched"),
    "odd": (seen({"a": 1}), "image_url.url is {'a': 1}, expected a valid string"),
    "cut": (seen(url(drawn())[:-40]), "cannot be read"),
    "format": (seen(url(drawn(), "BMP")), "expected PNG, JPEG, WEBP"),
    "large": (seen(url(drawn(size=(100, 51)))), "100 x 51 pixels, expected at most 5000"),
    "film": (seen(url(drawn(), "PNG", save_all=True, append_images=[drawn("blue")])), "several frames, expected one"),
    "a strip": (seen(url(drawn(size=(1, 51)))), "1 x 51 pixels, expected a longer side of at most 50 times"),
    "many": (seen(SMALL, SMALL, SMALL), "3 images came, at most 2 are taken"),
    "large together": (seen(HALF, HALF), "60 x 60 pixels, expected at most 1400"),
    "a place more": ([*seen(SMALL), {"role": "user", "content": "An <image>"}], "the processor refused 1 images"),
    "sound": ([{"role": "user", "content": [{"type": "input_audio"}]}], "expected one of 'text'"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_image_that_is_not_taken_is_refused_by_name(http, case):
    messages, words = BAD[case]
    answer = ask(http, messages)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


SIZES = ((2, 2), (40, 30), (1, 50), (50, 1), (300, 200), (60, 900))
PROCESSORS = {
    "CLIPImageProcessorPil": {"size": {"shortest_edge": 32}, "do_center_crop": False},
    "Qwen2VLImageProcessorPil": {},
    "Glm4vImageProcessorPil": {},
    "Idefics3ImageProcessorPil": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}},
    "LlavaOnevisionImageProcessorPil": {
        "size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 32], [32, 96], [96, 32], [96, 96]]
    },
    "GotOcr2ImageProcessorPil": {"size": {"height": 32, "width": 32}, "crop_to_patches": True},
    "SiglipImageProcessorPil": {"size": {"height": 32, "width": 32}},
    "Idefics2ImageProcessorPil": {"size": {"shortest_edge": 64, "longest_edge": 96}, "do_image_splitting": False},
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_resized_pixels_are_those_that_a_processor_makes(name):
    processor = getattr(transformers, name)(**PROCESSORS[name])
    for size in SIZES:
        made = processor(images=[drawn(size=size)], return_tensors="pt")["pixel_values"]
        pixels = sum(one.numel() for one in made) / 3
        assert pixels <= resized_pixels(processor, *size) * 1.1, size
        assert resized_pixels(processor, *size) <= 6 * pixels, size


@pytest.mark.parametrize("size", [(1, 50), (50, 1), (2, 90)])
def test_eyes_refuse_an_image_that_is_made_too_large_before_the_processor_runs(size, source):
    ran = []
    processor = SimpleNamespace(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 336}), __call__=lambda *_, **__: ran.append(1)
    )
    eyes = Eyes(processor, source.config, Limits(image_bytes=1 << 25))
    with pytest.raises(PromptError, match=f"{size[0]} x {size[1]} pixels, of which the processor makes more than"):
        eyes.take(seen(url(drawn(size=size))))
    assert not ran
    assert len(eyes.take(seen(url(drawn(size=(40, 30)))))[1]) == 1
