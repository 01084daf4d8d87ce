# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""MuSiQue: questions of two to four hops, built so that no hop can be left out."""

from .base import QuestionTask, Row


class Musique(QuestionTask):
    """CacheBlend's prompt, its two full stops and the missing space behind "Question:" included."""

    hub = ("dgslibisey/MuSiQue", None, "validation")
    prefix = (
        "You will be asked a question after reading several passages. Please directly answer the question based on "
        "the given passages. Do NOT repeat the question. The answer should be within 5 words..\nPassages:\n"
    )
    before_question = (
        "\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. The answer should "
        "be within 5 words. \nQuestion:"
    )

    def from_hub(self, row: Row) -> Row:
        """Titles and paragraphs become passages; aliases are answers too."""
        chunks = [f"{paragraph['title']}\n\n{paragraph['paragraph_text']}" for paragraph in row["paragraphs"]]
        answers = [row["answer"], *row.get("answer_aliases", [])]
        return {"id": row["id"], "chunks": chunks, "question": row["question"], "answers": answers}
