"""Which documents are read as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tiny_artifact
from subquad.passes.calibrate.passages import Document, passages, read_texts
from subquad.runtime.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tiny_artifact.build(tmp_path_factory.mktemp("tiny") / "words")
    tiny_artifact.add_tokenizer(folder)
    return Tokenizer.load(folder)


def document(number: int, size: int, file: int | None) -> Document:
    return Document(" ".join([f"w{number}"] * size), np.full(size, number), file)


def test_neighbours_of_one_file_are_joined_up_to_the_length(tokenizer: Tokenizer) -> None:
    found = passages([document(i, 5, file=i // 5) for i in range(1, 8)], 12, tokenizer)
    assert [row.tolist() for row in found] == [
        [*[1] * 5, *[2] * 5, *[3] * 2],
        # The end of the first file, which does not go on in the second.
        [4] * 5,
        [*[5] * 5, *[6] * 5, *[7] * 2],
    ]


def test_documents_of_jsonl_files_stay_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "w1 w2"}\n{"text": "w3"}\n')
    read = read_texts([tmp_path / "a.jsonl"], tokenizer)
    assert [row.tolist() for row in passages(read, 12, tokenizer)] == [[1, 2], [3]]
