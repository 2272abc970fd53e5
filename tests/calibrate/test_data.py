from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tiny_artifact
from subquad.passes.calibrate.data import CalibrationData, open_data
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import Manifest
from tiny_artifact import Tiny


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_artifact.build(tmp_path_factory.mktemp("tiny") / "decoder")
    tiny_artifact.add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_artifact.build(tmp_path_factory.mktemp("tiny") / "encoder", Tiny(causal=False))
    tiny_artifact.add_tokenizer(folder)
    return folder


def opened(
    folder: Path, *paths: Path, lengths: tuple[int, ...] = (16,), **kw: int
) -> CalibrationData:
    return open_data(Manifest.read(folder), folder, paths=paths, lengths=lengths, **kw)


def words(start: int, count: int) -> str:
    return " ".join(f"w{(start + i) % 32}" for i in range(count))


def rows(data: CalibrationData) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    halves = []
    for batches in (data.calibration, data.heldout):
        halves.append({tuple(row) for b in batches for row in b.feeds["input_ids"].tolist()})
    return halves[0], halves[1]


def equal(a: CalibrationData, b: CalibrationData) -> bool:
    return a.digest == b.digest and all(
        np.array_equal(x.feeds[n], y.feeds[n])
        for x, y in zip((*a.calibration, *a.heldout), (*b.calibration, *b.heldout), strict=True)
        for n in x.feeds
    )


def test_documents_are_on_one_side_only(decoder: Path, tmp_path: Path) -> None:
    # Every document repeats one word, so a row tells which documents it is from.
    lines = [json.dumps({"text": f"w{i} " * 40}) for i in range(20)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), "utf-8")
    data = opened(decoder, tmp_path / "texts.jsonl")
    calibration, heldout = ({t for row in half for t in row} for half in rows(data))
    assert calibration and heldout and not calibration & heldout
    assert calibration | heldout == set(range(20))
    assert not data.synthetic and "20 documents" in data.description
    assert equal(data, opened(decoder, tmp_path / "texts.jsonl"))
    assert not equal(data, opened(decoder, tmp_path / "texts.jsonl", seed=1))


def test_one_document_is_cut(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("w1 " * 100 + "w2 " * 100, "utf-8")
    data = opened(decoder, tmp_path / "one.txt")
    calibration, heldout = ({t for row in half for t in row} for half in rows(data))
    assert (calibration, heldout) == ({1}, {2})
    assert "first half" in data.description


def test_a_folder_is_read_in_order(decoder: Path, tmp_path: Path) -> None:
    for name in ("b.py", "a.txt"):
        (tmp_path / name).write_text(words(len(name), 300), "utf-8")
    (tmp_path / ".hidden").write_text("w31 " * 300, "utf-8")
    data = opened(decoder, tmp_path, lengths=(16, 32))
    assert data.lengths == (16, 32)
    assert data.description.startswith("a.txt, b.py: 2 documents, 600 tokens")


def test_tokens_per_half_are_bounded(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(words(0, 5000), "utf-8")
    data = opened(decoder, tmp_path / "one.txt", calibration_tokens=64, heldout_tokens=128)
    assert sum(b.feeds["input_ids"].size for b in data.calibration) == 64
    assert sum(b.feeds["input_ids"].size for b in data.heldout) == 128


def test_lengths_out_of_reach_are_said(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(words(0, 200), "utf-8")
    data = opened(decoder, tmp_path / "one.txt", lengths=(50, 150, 5000))
    assert data.lengths == (50,)
    assert "150" in " ".join(data.notes) and "5000" in " ".join(data.notes)
    with pytest.raises(UsageError, match="too short"):
        opened(decoder, tmp_path / "one.txt", lengths=(150,))


def test_encoders_read_documents_one_by_one(encoder: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": words(i, 10 + i)}) for i in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), "utf-8")
    data = opened(encoder, tmp_path / "texts.jsonl", lengths=(16,))
    (batch, *_) = data.calibration
    assert batch.padding == "right"
    mask, ids = batch.feeds["attention_mask"], batch.feeds["input_ids"]
    assert set(mask.sum(axis=1)) <= set(range(10, 17)) and not ids[mask == 0].any()


def test_encoders_read_neighbouring_paragraphs_together(encoder: Path, tmp_path: Path) -> None:
    for name, first in (("a", 1), ("b", 16)):
        texts = [" ".join([f"w{number}"] * 5) for number in range(first, first + 15)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts), "utf-8")
    data = opened(encoder, tmp_path / "a.txt", tmp_path / "b.txt", lengths=(12,))
    sides = []
    for half in rows(data):
        found = [[token for token in row if token] for row in half]
        # Every third paragraph of a row is cut.
        assert sum(len(row) == 12 for row in found) >= 4
        # Neighbours in the order of their file.
        assert all(row == sorted(row) for row in found)
        assert all((row[0] < 16) == (row[-1] < 16) for row in found)
        sides.append({token for row in found for token in row})
    assert not sides[0] & sides[1] and sides[0] | sides[1] == set(range(1, 31))


def test_arrays_are_split_by_rows(decoder: Path, tmp_path: Path) -> None:
    arrays = tiny_artifact.feeds(rows=9, length=12)
    tiny_artifact.save_npz(tmp_path / "rows.npz", arrays)
    data = opened(decoder, tmp_path / "rows.npz")
    calibration, heldout = rows(data)
    assert len(calibration) == 5 and len(heldout) == 4 and not calibration & heldout
    assert data.lengths == (12,)


def test_made_up_inputs_say_so_and_repeat(decoder: Path) -> None:
    data = opened(decoder, lengths=(20,))
    assert data.synthetic and data.description.startswith("SYNTHETIC")
    calibration, heldout = rows(data)
    assert not calibration & heldout
    ids = data.calibration[0].feeds["input_ids"]
    assert np.array_equal(ids[1, :10], ids[1, 10:]) and not np.array_equal(ids[0, :10], ids[0, 10:])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.npz": None, "b.txt": "w1 w2"}, "not both"),
        ({"a.jsonl": "{}"}, '"text" field'),
        ({"a.txt": "  "}, "holds no text"),
    ],
)
def test_bad_data(decoder: Path, tmp_path: Path, files: dict[str, str], reason: str) -> None:
    for name, text in files.items():
        if text is None:
            tiny_artifact.save_npz(tmp_path / name, tiny_artifact.feeds(rows=2))
        else:
            (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(UsageError, match=reason):
        opened(decoder, tmp_path)


def test_missing_data(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        opened(decoder, tmp_path / "none.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no files"):
        opened(decoder, tmp_path / "empty")
    arrays = tiny_artifact.feeds(rows=3)
    arrays["attention_mask"][1] = 0
    tiny_artifact.save_npz(tmp_path / "hidden.npz", arrays)
    with pytest.raises(UsageError, match="row 1 of 'attention_mask' is all 0"):
        opened(decoder, tmp_path / "hidden.npz")
    tiny_artifact.save_npz(tmp_path / "one.npz", tiny_artifact.feeds(rows=1))
    with pytest.raises(UsageError, match="one row"):
        opened(decoder, tmp_path / "one.npz")
