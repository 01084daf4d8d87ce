# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every test may use: tiny random models, requests made of ids, stores, folders and the command line."""

import functools
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_EVALUATE_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from huggingface_hub import constants
from hypothesis import HealthCheck, settings
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.untouched import assert_same, leaves_untouched, snapshot

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROOT = Path(__file__).resolve().parent.parent
HUB_CACHE = constants.HF_HUB_CACHE
IS_OLDEST = transformers.__version__.startswith("5.17.")
PUBLISHED = Path(os.environ.get("HF_BLEND_DATA") or ROOT.parent / "shared" / "data")


# a busy machine is no failure; `make test-slow` loads the long profile
settings.register_profile("short", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("short"), max_examples=500)
settings.load_profile("short")


def pytest_report_header() -> list[str]:
    """Say where the published files are looked for, since what they lack is skipped."""
    missing = "" if PUBLISHED.is_dir() else ", which is no folder, so their tests are skipped"
    return [f"published files: {PUBLISHED}{missing}"]


def pytest_collection() -> None:
    """Collect no garbage while files are imported, of which nothing becomes garbage; `few_objects` turns it on."""
    gc.disable()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Let torch compute in one thread everywhere, so that sums do not depend on the machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Keep objects made before a file's tests out of every collection of garbage: it takes half a second with them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def skip_in_the_oldest(why: str) -> None:
    """Skip a test of what the oldest supported transformers does otherwise."""
    if IS_OLDEST:
        pytest.skip(f"transformers 5.17: {why}")


def slow_but(*fast: Any, among: Iterable[Any]) -> list[Any]:
    """Give the parameters of a sweep: all of `among`, those that are not in `fast` with the mark `slow`."""
    sweep = [*among]
    assert {*fast} <= {*sweep}

    def slow(values: Any) -> Any:
        return pytest.param(*(values if isinstance(values, tuple) else (values,)), marks=pytest.mark.slow)

    return [values if values in fast else slow(values) for values in sweep]


def build_tiny_model(
    model_type: str = "llama", *, seed: int = 0, weight_scale: float = 6.0, **config: Any
) -> PreTrainedModel:
    """Build a random model, in float32 on the CPU, that is small but not trivial, with fields over those of `TINY`.

    At a `weight_scale` of 1 the attention would be nearly uniform.
    """
    settings = AutoConfig.for_model(model_type, **{**TINY, **config})
    random_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    torch.random.set_rng_state(random_state)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(weight_scale)
    return model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Give `build_tiny_model`: `tiny_model("qwen2", num_hidden_layers=2)` is a fresh model at each call."""
    return build_tiny_model


@pytest.fixture(scope="session")
def untouched() -> Callable[[PreTrainedModel], Any]:
    """Give `leaves_untouched`, a context manager: whatever happens inside may not change the model."""
    return leaves_untouched


class IdTokenizer:
    """Stands in for a tokenizer: a letter is a token; ids pass through `tokenize` as they are."""

    bos_token_id = 1
    pad_token_id = 0

    @staticmethod
    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *(3 + ord(letter) % 120 for letter in text)]

    @staticmethod
    def decode(ids: Any, **_: Any) -> str:
        return str(ids)


@functools.cache
def shared_tiny_model(model_type: str = "llama", attention: str = "sdpa", **config: Any) -> PreTrainedModel:
    """Build a tiny model once for all tests that leave it as they found it."""
    return build_tiny_model(model_type, attn_implementation=attention, **config)


SHARED_ZOO: dict[str, PreTrainedModel] = {}


def shared_zoo_model(model_type: str, attention: str = "", **config: Any) -> PreTrainedModel:
    """Build a small model of any type once for all tests that leave it as they found it."""
    from tiny_models import tiny_model

    name = repr((model_type, attention, config))
    if name not in SHARED_ZOO:
        model = tiny_model(model_type, **config)
        if attention:
            model.set_attn_implementation(attention)
        SHARED_ZOO[name] = model
    return SHARED_ZOO[name]


@pytest.fixture(scope="session")
def shared_model() -> Iterator[Callable[..., PreTrainedModel]]:
    """Give `shared_tiny_model`: `shared_model("qwen2", "eager")` is the same model at each call; do not change it."""
    before = snapshot(shared_tiny_model())
    yield shared_tiny_model
    assert_same(before, snapshot(shared_tiny_model()))


@pytest.fixture(scope="session")
def tokenizer() -> type[IdTokenizer]:
    """Give a tokenizer of letters, with BOS 1 and PAD 0."""
    return IdTokenizer


@pytest.fixture
def store() -> Iterator[Any]:
    """Give an empty store in memory."""
    from hf_blend import ChunkStore

    with ChunkStore.open("memory://") as opened:
        yield opened


def random_ids(count: int, seed: int) -> list[int]:
    """Draw token ids that are no special tokens."""
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_pieces(chunks: tuple[int, ...] = (17, 23, 31), prefix: int = 4, question: int = 9, seed: int = 0) -> dict:
    """Draw the pieces of a request as token ids, of the given lengths; BOS and the prefix come first."""
    drawn = [random_ids(length, 100 * seed + place) for place, length in enumerate((prefix, question, *chunks))]
    return {"prefix": [1, *drawn[0]], "chunks": drawn[2:], "question": drawn[1]}


@pytest.fixture(scope="session")
def pieces() -> Callable[..., dict]:
    """Give `random_pieces`: the keyword arguments of `BlendCache.inputs`, drawn as ids."""
    return random_pieces


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: `run("store", "ls")` gives exit code, stdout and stderr."""
    from hf_blend.cli.main import main

    def run_words(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return ended.value.code or 0, *capsys.readouterr()

    return run_words


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in an empty folder, with a default store of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_BLEND_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory as users have them: a small random model, saved, and a tokenizer whose tokens are bytes."""
    from tests.saved_models import save_tokenizer_of_bytes

    path = tmp_path_factory.mktemp("own-model")
    save_tokenizer_of_bytes(path)
    ids = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257}
    build_tiny_model(max_position_embeddings=2048, **ids).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def reference() -> tuple[Any, Any]:
    """Give a tiny trained model that answers over its toy world, and its tokenizer; leave both as they are."""
    from worlds import REFERENCE

    from hf_blend.evaluation.bundled import load_model

    return load_model(REFERENCE)


@pytest.fixture(scope="session")
def models() -> dict[str, tuple[PreTrainedModel, Any]]:
    """Give a small random model for each of two kinds of tokenizers, trained on a few sentences, and the tokenizer."""
    from tests.chat_templates import small_tokenizer

    tokenizers = {kind: small_tokenizer(kind) for kind in ("bytes", "spaces")}
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    return {kind: (build_tiny_model(vocab_size=len(one), **shape), one) for kind, one in tokenizers.items()}


@pytest.fixture
def known(request: pytest.FixtureRequest, models: dict[str, Any]) -> tuple[PreTrainedModel, Any]:
    """Give one of `models`; `indirect=["known"]` says which."""
    return models[getattr(request, "param", "spaces")]


@pytest.fixture(scope="session")
def small_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub in which the model named smollm2 is a small random one that chats and reads the handbook."""
    from hf_blend.model_names import PACKAGED
    from tests.saved_models import save_tokenizer_that_chats

    hub = tmp_path_factory.mktemp("hub")
    repository = hub / f"models--{PACKAGED['smollm2'].hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    path = repository / "snapshots" / "abc"
    ids = {"vocab_size": save_tokenizer_that_chats(path), "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 8192}
    build_tiny_model(**sizes, **ids).save_pretrained(path)
    return hub


@pytest.fixture(scope="module")
def small_smollm2(small_hub: Path) -> Iterator[None]:
    """Let the name smollm2 stand for a small model, here and in processes that are started."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_CACHE", str(small_hub))
        patched.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(small_hub))
        yield


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """Give a real chat model, loaded once, and its tokenizer; leave both as they are."""
    from hf_blend.errors import MissingExtraError
    from hf_blend.evaluation.bundled import load_model

    with pytest.MonkeyPatch.context() as patched:  # small_smollm2 may be in use
        patched.setattr("huggingface_hub.constants.HF_HUB_CACHE", HUB_CACHE)
        patched.setenv("HF_HUB_CACHE", HUB_CACHE)
        try:
            return load_model("smollm2")
        except MissingExtraError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="session")
def published() -> Path:
    """The folder with the files that others have published numbers on."""
    if not PUBLISHED.is_dir():
        pytest.skip(f"no published files: {PUBLISHED} is no folder. Set HF_BLEND_DATA to one that holds them.")
    return PUBLISHED


@pytest.fixture(scope="session")
def mistral_tokenizer(published: Path) -> Any:
    """The tokenizer of the model that the published numbers were made with."""
    from transformers import AutoTokenizer

    folder = published / "tokenizers" / "mistral-7b-v1-spm"
    if not folder.is_dir():
        pytest.skip(f"there is no tokenizer in {folder.parent}")
    return AutoTokenizer.from_pretrained(folder)
