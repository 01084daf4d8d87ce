# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chat templates with the constructs of published ones, and small tokenizers trained for the tests."""

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
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
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find documents.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
MARKS = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|end|>"),
    *("<|assistant|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|CHATBOT_TOKEN|>", "<results>", "</results>"),
)

CHATML = """{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN3 = """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- "# Tools\n\nYou may call functions:\n<tools>" }}
{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if message.role == 'user' and ns.last == messages|length - 1 %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{%- set content = message.content %}{%- set reasoning = '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if loop.index0 > ns.last %}
{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """{%- set loop_messages = messages %}{%- for message in loop_messages %}
{%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + \
'<|eot_id|>' %}
{%- if loop.index0 == 0 %}{%- set content = bos_token + content %}{%- endif %}{{- content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

MISTRAL = """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}
{%- for message in loop_messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}
{{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}
{%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"""

GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}\
{%- endif -%}
{%- for message in messages -%}{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- else -%}{%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}\
{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

PHI = """{% for message in messages %}{% if message['role'] == 'system' %}\
{{'<|system|>\n' + message['content'] + '<|end|>\n'}}\
{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}\
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

COMMAND_R = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = '## Task and Context\\nYou help people answer their questions.' %}{% endif %}\
{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}\
{% for message in loop_messages %}{% set content = message['content'] %}\
{% if message['role'] == 'user' %}\
{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}\
{% elif message['role'] == 'assistant' %}\
{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}\
{% if documents %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>' }}{% for document in documents %}\
{{ '\nDocument: ' }}{{ loop.index0 }}\n{% for key, value in document.items() %}{{ key }}: {{ value }}\n{% endfor %}\
{% endfor %}{{ '</results><|END_OF_TURN_TOKEN|>' }}{% endif %}\
{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

JOINED = "\n\n".join(DOCUMENTS)
SYSTEM = {"role": "system", "content": "You answer from documents, in a few words."}
ASKED = {"role": "user", "content": f"{JOINED}\n\nQuestion: {QUESTION}"}
TURNS = [
    {"role": "user", "content": f"Here is what I found.\n\n<doc>{DOCUMENTS[0]}</doc>"},
    {"role": "assistant", "content": "<think>\nA harbour.\n</think>\n\nThank you, what is the question?"},
    {"role": "user", "content": f"- {DOCUMENTS[2]}\n- {DOCUMENTS[1]}\n\n{QUESTION}"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": part} for part in (*DOCUMENTS, QUESTION)]}]
TITLED = [{"title": text[:12], "text": text} for text in DOCUMENTS]

CASES = {
    "chatml": (CHATML, [SYSTEM, ASKED], DOCUMENTS, {}),
    "chatml, several turns": (CHATML, [SYSTEM, *TURNS], DOCUMENTS, {}),
    "qwen3": (QWEN3, [SYSTEM, ASKED], DOCUMENTS, {}),
    "qwen3 without thinking": (QWEN3, [SYSTEM, ASKED], DOCUMENTS, {"enable_thinking": False}),
    "qwen3 with tools and turns": (QWEN3, [SYSTEM, *TURNS], DOCUMENTS, {"tools": TOOLS}),
    "llama 3": (LLAMA3, [SYSTEM, ASKED], DOCUMENTS, {}),
    "mistral": (MISTRAL, [SYSTEM, ASKED], DOCUMENTS, {}),
    "mistral, several turns": (MISTRAL, TURNS, DOCUMENTS, {}),
    "gemma": (GEMMA, [ASKED], DOCUMENTS, {}),
    "gemma, content in parts": (GEMMA, PARTS, DOCUMENTS, {}),
    "phi": (PHI, [SYSTEM, ASKED], DOCUMENTS, {}),
    "phi, a system prompt with documents": (PHI, [{**SYSTEM, "content": JOINED}, TURNS[0]], DOCUMENTS, {}),
    "command-r, its own documents": (COMMAND_R, [SYSTEM, {**ASKED, "content": QUESTION}], TITLED, {}),
    "an answer that is begun": (
        CHATML,
        [ASKED, {"role": "assistant", "content": "It is"}],
        DOCUMENTS,
        {"continue_final_message": True},
    ),
}


@functools.cache
def small_tokenizer(kind: str = "bytes") -> PreTrainedTokenizerFast:
    """Train a tokenizer on the documents: "bytes" as GPT-2's, "spaces" as those of SentencePiece, with BOS."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "spaces", unk_token="<unk>" if kind == "spaces" else None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        lines = pre_tokenizers.Split("\n", "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.Metaspace(prepend_scheme="first")])
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<pad>", "<s>", "</s>", "<unk>", *MARKS]
    given = {"initial_alphabet": alphabet} if kind == "bytes" else {}
    extra = [] if kind == "bytes" else alphabet
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*special, *extra], show_progress=False, **given)
    tokenizer.train_from_iterator([JOINED, *DOCUMENTS, QUESTION, SYSTEM["content"]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
