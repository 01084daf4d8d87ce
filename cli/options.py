# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, said once: the same names, the same help, the same defaults.

The selector and the ratio that are used where nothing is said are those of `BlendConfig`, here as in the library.
"""

from typing import Annotated

import typer

from hf_blend.config import BlendConfig
from hf_blend.evaluation.parsing import LIMITS

REAL = "smollm2"  # the model of those who name none
RATIO, SELECTOR = BlendConfig.recompute_ratio, BlendConfig.selector
MEGABYTES, SECONDS = LIMITS.megabytes, LIMITS.seconds

Model = Annotated[
    str | None, typer.Option(help="Hub id or path; else the largest chat model here that fits the memory, or smollm2.")
]
Place = Annotated[str, typer.Option("--store", help="Where chunks are kept.")]
Store = Annotated[str | None, typer.Option("--store", help="Folder of the chunk store; the default is the library's.")]
Corpus = Annotated[
    list[str] | None,
    typer.Argument(metavar="CORPUS", help="Files or folders; without any, the bundled handbook. - is stdin."),
]
Question = Annotated[
    str | None, typer.Argument(metavar="QUESTION", help="The question; without one, bundled ones are asked.")
]
Documents = Annotated[
    list[str] | None,
    typer.Argument(metavar="DOCUMENT", help="Files or folders, of text and of many formats; - is stdin."),
]
Device = Annotated[str, typer.Option(help="Where the model runs, such as cuda:1; auto is a GPU if there is one.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16; auto is as they were saved.")]
Weights = Annotated[str, typer.Option(help="8bit or 4bit, by bitsandbytes; auto is as they were saved.")]
Ratio = Annotated[float | None, typer.Option(help="Share of the reusable tokens that is recomputed, 0 to 1.")]
Selector = Annotated[
    str | None, typer.Option(help="Which tokens are recomputed: a method or a file with one, options behind it.")
]
Partial = Annotated[
    float | None, typer.Option(help="Share of the stored blocks that is loaded, chosen by the question; else all.")
]
Controller = Annotated[
    bool, typer.Option("--controller", help="Measure, and compute a chunk where that is faster than loading it.")
]
FileMegabytes = Annotated[int, typer.Option(min=1, help="Most MB of a file of documents; of HTML an eighth.")]
FileSeconds = Annotated[
    float, typer.Option(min=0.001, help="Most seconds to read a file, and as many to split it, for each of its MB.")
]
Include = Annotated[
    list[str] | None, typer.Option("--include", help="Read only these files of folders: a line of .gitignore.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", help="Leave these files of folders out: a line of .gitignore.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Name every file that is left out, however many.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Most tokens of a piece that a document is split into.")]
IndexedTokens = Annotated[
    int | None, typer.Option("--chunk-tokens", min=1, help="Most tokens of a piece; as indexed, or 512, if left out.")
]
Unverified = Annotated[bool, typer.Option("--allow-unverified", help="Use a model that was not found to be exact.")]
TopK = Annotated[
    int | None,
    typer.Option(min=0, help="Most pieces of documents for a question; 0 is all that fit, else by the model's size."),
]
Meaning = Annotated[
    str | None,
    typer.Option(help="Sentence encoder, a folder or an id in the hub's cache: pieces are found by meaning, too."),
]
System = Annotated[str | None, typer.Option(help="Text before the documents.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Where an answer is cut.")]
