# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A whole program: store the KV of documents once, then answer over them inside stock `generate`.

Run it with `python examples/rag.py`.
"""

import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bundled import REFERENCE, quickstart_questions


def main() -> None:
    """Answer the bundled questions, and say what each prefill cost."""
    model = AutoModelForCausalLM.from_pretrained(REFERENCE).eval()
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(folder) as store:
        for asked in quickstart_questions():
            cache = BlendCache(model, store)
            inputs = cache.inputs(tokenizer, chunks=asked["chunks"], question=asked["question"])
            output = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
            answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            print(f"{asked['question']} {answer}\n    {cache.report}")


if __name__ == "__main__":
    main()
