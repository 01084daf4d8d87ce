# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A LlamaIndex query engine that answers from retrieved nodes with their KV reused.

Needs `pip install llama-index-core`. Run it with `python examples/llama_index_rag.py`.
"""

from typing import Any

from llama_index.core import QueryBundle
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bundled import load_model, quickstart_questions


class AllNodes(BaseRetriever):
    """Stands in for your retriever, an index's `as_retriever()` for example."""

    def __init__(self, texts: list[str]) -> None:
        self.nodes = [TextNode(text=text) for text in texts]
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self.nodes]


class BlendedQueryEngine(CustomQueryEngine):
    """Retrieves, then lets the model answer; a node that was seen before is not prefilled again."""

    retriever: BaseRetriever
    model: Any
    tokenizer: Any
    store: Any

    def custom_query(self, query_str: str) -> str:
        """Answer one question."""
        cache = BlendCache(self.model, self.store)
        texts = [found.node.get_content() for found in self.retriever.retrieve(query_str)]
        inputs = cache.inputs(self.tokenizer, chunks=texts, question=query_str)
        output = self.model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
        answer = self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return f"{answer.strip()} ({cache.report.loaded_chunks} chunks loaded)"


def main() -> None:
    """Ask the questions about the first bundled story."""
    asked = [one for one in quickstart_questions() if one["story"] == 1]
    model, tokenizer = load_model()
    engine = BlendedQueryEngine(
        retriever=AllNodes(asked[0]["chunks"]), model=model, tokenizer=tokenizer, store=ChunkStore.open("memory://")
    )
    for one in asked:
        print(one["question"], engine.query(one["question"]), "- wanted:", one["answer"])


if __name__ == "__main__":
    main()
