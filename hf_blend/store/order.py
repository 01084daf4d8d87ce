# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The order of documents in which a prompt continues the longest stored chain.

Source: ContextPilot (arXiv 2511.03475) orders documents that requests share into common beginnings of prompts.
Differs: only what continues a stored chain is put first; the other documents stay as the caller has ranked them.
"""

from collections.abc import Sequence

from .chunk import ChunkKey
from .index import pack_tokens

SEAM_TOKENS = 8  # so many of the first and last tokens of a document may differ in a prompt
LEAST_TOKENS = 8  # of a document between these, or it is not looked for


def longest_chain(links: Sequence[ChunkKey], documents: Sequence[Sequence[int]]) -> list[int]:
    """Give the numbers of the documents that the longest chain consists of, in its order.

    Links name all tokens before them. Of chains with as many tokens of documents that of the earlier ones is taken.
    """
    packed: list[bytes | None] = []
    for document in documents:
        inside = document[SEAM_TOKENS : len(document) - SEAM_TOKENS]
        packed.append(pack_tokens(inside) if len(inside) >= LEAST_TOKENS else None)
    behind: dict[tuple[int, ...], list[ChunkKey]] = {}
    ends = set()
    for link in links:
        behind.setdefault(link.chunk_prefix_ids, []).append(link)
        ends.add(link.chunk_prefix_ids + link.token_ids)

    # From every beginning that is no link itself, by the documents that are left
    best: tuple[int, list[int]] = (0, [])
    unfinished: list[tuple[tuple[int, ...], list[int]]] = [(start, []) for start in behind if start not in ends]
    while unfinished:
        start, numbers = unfinished.pop()
        tokens = sum(len(documents[number]) for number in numbers)
        best = max(best, (tokens, numbers), key=lambda found: (found[0], [-number for number in found[1]]))
        for link in behind.get(start, ()):
            content = pack_tokens(link.token_ids)
            for number, needed in enumerate(packed):
                if needed is not None and number not in numbers and needed in content:
                    unfinished.append((start + link.token_ids, [*numbers, number]))
    return best[1]
