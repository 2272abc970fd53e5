"""safetensors headers are checked, tensors are read only when asked for."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from subquad.converter.weights import (
    DerivedTensor,
    StoredTensor,
    identity_key,
    open_checkpoint,
    read_safetensors,
    transposed,
)
from subquad.runtime.errors import UnsupportedModelError


def _write(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def _entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors: dict[str, NDArray[Any]] = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(5, dtype=np.int64),
        "c": np.array(2.5, np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert set(found) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(found[name].read(), values)
        assert found[name].read().dtype == values.dtype


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"short", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 3, "not a safetensors file"),
        (struct.pack("<Q", 2**62) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 10) + b"{not json}", "malformed"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=reason):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (_entry([4], 0, 1000), "does not fit"),
        (_entry([4], -16, 0), "does not fit"),
        (_entry([-4], 0, 16), "does not fit"),
        (_entry([2**60], 0, 16), "does not fit"),
        (_entry([4], 0, 12), "does not fit"),
        (_entry([4], 0, 16, "F8_E4M3"), "Quantised"),
        ({"dtype": "F32"}, "malformed"),
        ("text", "malformed"),
        (_entry([2.0, 2], 0, 16), "does not fit"),  # type: ignore[list-item]
    ],
)
def test_entries_that_lie(tmp_path: Path, entry: Any, reason: str) -> None:
    path = _write(tmp_path / "model.safetensors", {"w": entry}, b"\0" * 16)
    with pytest.raises(UnsupportedModelError, match=reason):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"w": "absent.safetensors"}, "missing from"),
        ({"w": "../model.safetensors"}, "same folder"),
        ({"w": "/etc/passwd"}, "same folder"),
        ({"other": "model-1.safetensors"}, "do not hold"),
        (["w"], "malformed"),
    ],
)
def test_index_that_lies(tmp_path: Path, weight_map: Any, reason: str) -> None:
    _write(tmp_path / "model-1.safetensors", {"w": _entry([4], 0, 16)}, b"\0" * 16)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError, match=reason):
        open_checkpoint(tmp_path)


def test_loading_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "model.safetensors", {"w": _entry([2, 2], 0, 16)}, b"\0" * 16)

    def forbidden(self: StoredTensor) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(StoredTensor, "read", forbidden)
    stored = read_safetensors(path)["w"]
    lazy = stored.to_ir("w", ir.DataType.DOUBLE)
    assert transposed(lazy, (1, 0), "t").shape == (2, 2)
    with pytest.raises(AssertionError, match="read"):
        lazy.numpy()


def test_transposes_and_casts_compose(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float16)
    (tmp_path / "w").write_bytes(values.tobytes())
    stored = StoredTensor(tmp_path / "w", 0, ir.DataType.FLOAT16, (2, 3, 4))
    for tensor in (
        stored.to_ir("w", ir.DataType.FLOAT),
        stored.to_ir("w"),
        ir.Tensor(values, name="w"),
        ir.LazyTensor(lambda: ir.Tensor(values), ir.DataType.FLOAT16, ir.Shape((2, 3, 4))),
    ):
        twice = transposed(transposed(tensor, (1, 2, 0), "a"), (0, 2, 1), "b")
        want = values.transpose(1, 2, 0).transpose(0, 2, 1)
        assert tuple(twice.shape.numpy()) == want.shape
        np.testing.assert_array_equal(twice.numpy(), want.astype(twice.numpy().dtype))


def test_identity_keys(tmp_path: Path) -> None:
    stored = StoredTensor(tmp_path / "w", 0, ir.DataType.FLOAT16, (2, 3))
    same = StoredTensor(tmp_path / "w", 0, ir.DataType.FLOAT16, (2, 3))
    assert identity_key(stored.to_ir("a")) == identity_key(same.to_ir("b"))
    derived = DerivedTensor(stored, ir.DataType.FLOAT, (1, 0))
    assert identity_key(derived.to_ir("a")) == identity_key(derived.to_ir("b"))
    assert identity_key(derived.to_ir("a")) != identity_key(stored.to_ir("a"))
