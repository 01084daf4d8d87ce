# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""2WikiMultihopQA: questions whose answer joins facts from several passages."""

from .base import QuestionTask, Row


class Wikimqa(QuestionTask):
    """CacheBlend's prompt; departs where the whole list of answers counts, not the first alias alone."""

    hub = ("framolfese/2WikiMultihopQA", None, "validation")
    prefix = (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\n"
    )
    before_question = (
        "\n\nAnswer the question based on the given passages. Answer the question within 5 words. Do NOT repeat the "
        "question or output any other words. Question: "
    )

    def from_hub(self, row: Row) -> Row:
        """Titles and sentences become passages."""
        context = row["context"]
        pairs = zip(context["title"], context["sentences"], strict=True)
        chunks = [f"{title}\n\n{''.join(sentences)}" for title, sentences in pairs]
        return {"id": row["id"], "chunks": chunks, "question": row["question"], "answers": [row["answer"]]}
