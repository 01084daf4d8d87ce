# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A whole program: store the KV of documents once, then answer over them inside stock `generate`.

Run it with `python examples/rag.py`; a chat model of your own goes behind it, as a folder or a hub id.
"""

import sys
import tempfile

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bundled import handbook_questions, load_model


def main(name: str = "smollm2") -> None:
    """Answer questions about the bundled handbook, and say what each prefill cost."""
    model, tokenizer = load_model(name)
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(folder) as store:
        for asked in handbook_questions():
            cache = BlendCache(model, store)
            content = f"{''.join(asked['chunks'])}Question: {asked['question']}"
            inputs = cache.inputs_from_messages(tokenizer, [{"role": "user", "content": content}], asked["chunks"])
            output = model.generate(**inputs, **cache.keyword, max_new_tokens=32, do_sample=False)
            answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            print(f"{asked['question']} {answer}\n    {cache.report}")


if __name__ == "__main__":
    main(*sys.argv[1:])
