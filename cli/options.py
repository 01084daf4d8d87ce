# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, said once: the same names, the same help, the same defaults.

The selector and the ratio that are used where nothing is said are those of `BlendConfig`, here as in the library.
"""

from typing import Annotated

import typer

from hf_blend.config import BlendConfig

REAL = "smollm2"  # the model of those who name none
RATIO = BlendConfig.recompute_ratio
SELECTOR = BlendConfig.selector

Model = Annotated[str, typer.Option(help="Hub id, folder, or smollm2.")]
Place = Annotated[str, typer.Option("--store", help="Where chunks are kept.")]
Store = Annotated[str | None, typer.Option("--store", help="Folder of the chunk store; the default is the library's.")]
Corpus = Annotated[
    list[str] | None,
    typer.Argument(metavar="CORPUS", help="Files or folders; without any, the bundled handbook. - is stdin."),
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
ChunkTokens = Annotated[int, typer.Option(min=1, help="Most tokens of a chunk; as they were indexed.")]
Unverified = Annotated[bool, typer.Option("--allow-unverified", help="Use a model that was not found to be exact.")]
TopK = Annotated[int, typer.Option(min=0, help="Most chunks for a question; 0 is all that fit.")]
System = Annotated[str | None, typer.Option(help="Text before the documents.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Where an answer is cut.")]
