# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chat templates that do what published ones do, each in a file, and small tokenizers trained for the tests."""

import copy
import functools
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

DOCUMENTS = [
    "Harbour office\n\nThe harbour office of Lund opens at seven in the morning. It keeps 214 berths, and a crane "
    "of 12 tonnes that was built in 1931. Its master is Ines Okafor.",
    "Ines Okafor (born 4 March 1971) is a harbour master. She was a pilot in Gävle before, and has kept bees since "
    "2009 in the garden of the old customs house.",
    "The old customs house: three floors, a slate roof, and a clock that is nine minutes slow. Nobody has repaired "
    "it, because the ferry's timetable was made by this clock.",
]
QUESTION = "How slow is the clock of the house in whose garden the harbour master keeps bees?"
THOUGHT = ("<think>", "</think>")
TOOLS = [{"type": "function", "function": {"name": "search", "description": "Find documents."}}]
MARKS = """
<|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn>
<end_of_turn> <|system|> <|user|> <|end|> <|start_of_role|> <|end_of_role|> <|assistant|>
<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <results>
</results>
""".split()

TEMPLATES = {path.stem: path.read_text("utf-8") for path in (Path(__file__).parent / "templates").glob("*.jinja")}
CHATML = TEMPLATES["chatml"]
QWEN3 = TEMPLATES["qwen3"]
LLAMA3 = TEMPLATES["llama3"]
MISTRAL = TEMPLATES["mistral"]
GEMMA = TEMPLATES["gemma"]
PHI = TEMPLATES["phi"]
COMMAND_R = TEMPLATES["command_r"]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


JOINED = "\n\n".join(DOCUMENTS)
SYSTEM = {"role": "system", "content": "You answer from documents, in a few words."}
ASKED = user(f"{JOINED}\n\nQuestion: {QUESTION}")
TURNS = [
    user(f"Here is what I found.\n\n<doc>{DOCUMENTS[0]}</doc>"),
    assistant("<think>\nA harbour.\n</think>\n\nThank you, what is the question?"),
    user(f"- {DOCUMENTS[2]}\n- {DOCUMENTS[1]}\n\n{QUESTION}"),
]
PARTS = [{"type": "text", "text": part} for part in (*DOCUMENTS, QUESTION)]
TITLED = [{"title": text[:12], "text": text} for text in DOCUMENTS]

CASES = {
    "qwen3 with tools and turns": (QWEN3, [SYSTEM, *TURNS], DOCUMENTS, {"tools": TOOLS}),
    "llama 3": (LLAMA3, [SYSTEM, ASKED], DOCUMENTS, {}),
    "mistral, several turns": (MISTRAL, TURNS, DOCUMENTS, {}),
    "gemma, content in parts": (GEMMA, [user(PARTS)], DOCUMENTS, {}),
    "phi, a system prompt with documents": (PHI, [{**SYSTEM, "content": JOINED}, TURNS[0]], DOCUMENTS, {}),
    "command-r, its own documents": (COMMAND_R, [SYSTEM, {**ASKED, "content": QUESTION}], TITLED, {}),
}


def small_tokenizer(kind: str = "bytes") -> PreTrainedTokenizerFast:
    """A tokenizer trained on the documents: "bytes" as GPT-2's, "spaces" as those of SentencePiece, with BOS."""
    return copy.deepcopy(_trained(kind))  # so that a test may give it a template


@functools.cache
def _trained(kind: str) -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "</s>", "<unk>", *MARKS]
    alphabet = []
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        lines = pre_tokenizers.Split("\n", "isolated")
        words = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, words])
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        for byte in range(256):
            special.append(f"<0x{byte:02X}>")
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([JOINED, *DOCUMENTS, QUESTION, SYSTEM["content"]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    for mark in THOUGHT:
        tokenizer.add_tokens([AddedToken(mark, normalized=False)])  # text, as in published ones
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
