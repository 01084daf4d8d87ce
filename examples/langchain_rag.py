# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A LangChain chain whose last link answers from retrieved documents with their KV reused.

Needs `pip install langchain-core`. Run it with `python examples/langchain_rag.py`.
"""

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bundled import load_model, quickstart_questions


class AllDocuments(BaseRetriever):
    """Stands in for your retriever, a vector store's `as_retriever()` for example."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return self.documents


class Answerer:
    """The link: documents and a question in, an answer out."""

    def __init__(self, model, tokenizer, store: ChunkStore) -> None:
        self.model, self.tokenizer, self.store = model, tokenizer, store

    def __call__(self, given: dict) -> str:
        """Answer from `given["documents"]`; a document that was seen before is not prefilled again."""
        cache = BlendCache(self.model, self.store)
        texts = [document.page_content for document in given["documents"]]
        inputs = cache.inputs(self.tokenizer, chunks=texts, question=given["question"])
        output = self.model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
        answer = self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return f"{answer.strip()} ({cache.report.loaded_chunks} chunks loaded)"


def main() -> None:
    """Ask the questions about the first bundled story."""
    asked = [one for one in quickstart_questions() if one["story"] == 1]
    retriever = AllDocuments(documents=[Document(page_content=text) for text in asked[0]["chunks"]])
    answerer = RunnableLambda(Answerer(*load_model(), ChunkStore.open("memory://")))
    chain = {"documents": retriever, "question": RunnablePassthrough()} | answerer
    for one in asked:
        print(one["question"], chain.invoke(one["question"]), "- wanted:", one["answer"])


if __name__ == "__main__":
    main()
