# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chat over documents: all messages are passed each turn, by the model's own chat template.

Run it with `python examples/chat.py`, or with the folder of a chat model behind it.
"""

import sys

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bundled import handbook_questions, load_model


def main() -> None:
    """Ask the questions about the bundled handbook, one turn each."""
    model, tokenizer = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
    asked = handbook_questions()
    documents = [page.strip() for page in asked[0]["chunks"]]
    cache, messages = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=0.3), []
    for turn, one in enumerate(asked):
        texts = [one["question"]] if turn else [*documents, one["question"]]
        messages.append({"role": "user", "content": "\n".join(texts)})
        inputs = cache.inputs_from_messages(tokenizer, messages, documents)
        output = model.generate(**inputs, **cache.keyword, max_new_tokens=24, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        messages.append({"role": "assistant", "content": answer})
        print(f"{one['question']} {answer}\n    {cache.report.past_tokens} tokens kept; {cache.report}")


if __name__ == "__main__":
    main()
