"""Rows for models that see a whole row at once: documents, or neighbouring paragraphs of a file.

What is calibrated at 512 tokens has to see 512 tokens, and few paragraphs have as many. So
paragraphs of one half of a file that follow each other are read as one text, up to the length. A
document of a JSONL file is never joined with another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.samples import read_documents
from subquad.runtime.text import Tokenizer

BETWEEN = "\n\n"


@dataclass(frozen=True)
class Document:
    """A text, or a paragraph of one.

    Attributes:
        text: not empty.
        ids: its tokens, special ones around them.
        file: that it may be joined with its neighbours in; ``None``: with nothing.
    """

    text: str
    ids: NDArray[np.int64]
    file: int | None


def read_texts(files: Sequence[Path], tokenizer: Tokenizer) -> list[Document]:
    """The documents of JSONL files, the paragraphs of others; those without tokens are left out.

    Raises:
        UsageError: a file that cannot be read, or that holds no text.
    """
    found = []
    for number, file in enumerate(files):
        place = None if file.suffix.lower() == ".jsonl" else number
        for text in read_documents(file, split=True):
            ids = np.asarray(tokenizer.encode(text), np.int64)
            if len(ids):
                found.append(Document(text, ids, place))
    return found


def passages(
    documents: Sequence[Document], length: int, tokenizer: Tokenizer
) -> list[NDArray[np.int64]]:
    """Tokens of each passage, in order, at most ``length``; the last of a file may be short.

    Args:
        documents: of one half, neighbours next to each other.
        length: tokens of a row.
        tokenizer: what encoded them.
    """
    around = len(tokenizer.encode(""))
    texts = (
        BETWEEN.join(document.text for document in run) for run in _runs(documents, length, around)
    )
    return [np.asarray(tokenizer.encode(text, limit=length), np.int64) for text in texts]


def _runs(documents: Sequence[Document], length: int, around: int) -> Iterator[list[Document]]:
    """Neighbours that together have ``length`` tokens, ``around`` of each row being special."""
    run: list[Document] = []
    size = around
    for document in documents:
        if run and (document.file is None or document.file != run[-1].file or size >= length):
            yield run
            run, size = [], around
        run.append(document)
        size += len(document.ids) - around
    if run:
        yield run
