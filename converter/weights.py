"""Weights that stay on disk until they are written: safetensors entries, casts and transposes."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.runtime.errors import UnsupportedModelError

INDEX_NAME = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000  # the safetensors format's own limit
_DTYPES = {
    "F64": ir.DataType.DOUBLE,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I64": ir.DataType.INT64,
    "I32": ir.DataType.INT32,
    "I16": ir.DataType.INT16,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
    "BOOL": ir.DataType.BOOL,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor inside a file, not read.

    Attributes:
        path: resolved path of the file.
        offset: of its first byte in the file.
        dtype, shape: as stored, little endian, row-major.
    """

    path: Path
    offset: int
    dtype: ir.DataType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.bitwidth // 8

    def read(self) -> NDArray[Any]:
        """Read by plain I/O: a mapping would stay in the process's resident size."""
        count = math.prod(self.shape)
        flat = np.fromfile(self.path, self.dtype.numpy(), count=count, offset=self.offset)
        return flat.reshape(self.shape)

    def to_ir(self, name: str, dtype: ir.DataType | None = None) -> ir.TensorProtocol:
        """As an initializer of ``dtype`` (default: as stored); still not read."""
        if dtype is None or dtype == self.dtype:
            # Absolute location and no base_dir: the path was resolved and checked by us, and
            # onnx_ir would refuse hard-linked files, which package managers create.
            return ir.ExternalTensor(
                os.fspath(self.path),
                self.offset,
                self.nbytes,
                self.dtype,
                shape=ir.Shape(self.shape),
                name=name,
            )
        return DerivedTensor(self, dtype=dtype).to_ir(name)


@dataclass(frozen=True)
class DerivedTensor:
    """A stored tensor cast to ``dtype`` and then transposed by ``permutation``, on demand."""

    source: StoredTensor
    dtype: ir.DataType
    permutation: tuple[int, ...] | None = None

    def __call__(self) -> ir.TensorProtocol:
        array = self.source.read()
        if self.dtype != self.source.dtype:
            array = array.astype(self.dtype.numpy())
        if self.permutation is not None:
            array = array.transpose(self.permutation)
        return ir.Tensor(array, dtype=self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.source.shape
        if self.permutation is None:
            return shape
        return tuple(shape[axis] for axis in self.permutation)

    def to_ir(self, name: str) -> ir.LazyTensor:
        return ir.LazyTensor(self, self.dtype, ir.Shape(self.shape), name=name)


def transposed(
    tensor: ir.TensorProtocol, permutation: Sequence[int], name: str
) -> ir.TensorProtocol:
    """``tensor`` with permuted axes, as lazy as ``tensor`` itself."""
    permutation = tuple(permutation)
    if isinstance(tensor, ir.ExternalTensor):
        stored = StoredTensor(
            Path(tensor.path), tensor.offset or 0, tensor.dtype, _static_shape(tensor)
        )
        return DerivedTensor(stored, tensor.dtype, permutation).to_ir(name)
    if isinstance(tensor, ir.LazyTensor):
        if isinstance(tensor.raw, DerivedTensor):
            earlier = tensor.raw.permutation or range(len(permutation))
            combined = tuple(earlier[axis] for axis in permutation)
            return DerivedTensor(tensor.raw.source, tensor.dtype, combined).to_ir(name)
        shape = _static_shape(tensor)
        return ir.LazyTensor(
            _transpose_later(tensor, permutation),
            tensor.dtype,
            ir.Shape([shape[axis] for axis in permutation]),
            name=name,
        )
    # In memory already: a view costs nothing.
    return ir.Tensor(tensor.numpy().transpose(permutation), dtype=tensor.dtype, name=name)


def identity_key(tensor: ir.TensorProtocol) -> object:
    """Equal keys, equal content; found without reading. The tensor must outlive the key."""
    if isinstance(tensor, ir.ExternalTensor):
        return (tensor.path, tensor.offset or 0, tensor.nbytes)
    if isinstance(tensor, ir.LazyTensor) and isinstance(tensor.raw, DerivedTensor):
        return tensor.raw
    return id(tensor)


def is_lazy(tensor: ir.TensorProtocol | None) -> bool:
    """Whether the content is still on disk only."""
    return isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor))


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Parse and check the header of a ``.safetensors`` file; tensors are not read.

    Raises:
        UnsupportedModelError: the file is truncated, malformed or of an unknown dtype.
    """
    try:
        path = path.resolve(strict=True)
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise UnsupportedModelError(
                    f"{path.name} is not a safetensors file: its header would be {length} bytes "
                    f"in a file of {size}. It may be truncated or a Git LFS pointer; download it "
                    "again."
                )
            raw = file.read(length)
        header = json.loads(raw)
    except OSError as error:
        raise UnsupportedModelError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(
            f"{path.name}: malformed safetensors header: {error}."
        ) from error
    if not isinstance(header, dict):
        raise UnsupportedModelError(f"{path.name}: malformed safetensors header: not an object.")
    data_start = 8 + length
    return {
        name: _stored_tensor(path, name, entry, data_start, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def open_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder with ``*.safetensors``, sharded or not; none is read.

    Raises:
        UnsupportedModelError: no safetensors, a shard is missing or outside the folder, or the
            index names a tensor that its shard lacks.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise UnsupportedModelError(_no_safetensors(folder))
        return {key: value for file in files for key, value in read_safetensors(file).items()}
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModelError(
            f"{index.name} is malformed: expected an object with a 'weight_map' ({error})."
        ) from error
    for name in names:
        if Path(name).name != name or name in {"", ".", ".."}:
            raise UnsupportedModelError(
                f"{index.name} refers to {name!r}, but shards must lie in the same folder."
            )
        if not (folder / name).is_file():
            raise UnsupportedModelError(
                f"{index.name} lists the shard {name!r}, which is missing from {folder}. "
                "Download the checkpoint completely."
            )
    shards = {name: read_safetensors(folder / name) for name in names}
    missing = [key for key, name in weight_map.items() if key not in shards[name]]
    if missing:
        raise UnsupportedModelError(
            f"{index.name} lists tensors its shards do not hold, e.g. {missing[0]!r}. "
            "The shards belong to another version; download the checkpoint again."
        )
    return {key: shards[name][key] for key, name in weight_map.items()}


def _no_safetensors(folder: Path) -> str:
    pickled = sorted(
        path.name
        for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")
        for path in folder.glob(pattern)
    )
    if not pickled:
        return f"{folder} holds no *.safetensors weights."
    return (
        f"{folder} holds only pickled weights ({', '.join(pickled)}). A pickle can execute code, "
        "so it is never read. If you trust it, save it again once: "
        "model = AutoModel.from_pretrained(folder); model.save_pretrained(new_folder), "
        "with the Auto class of your task; save_pretrained writes safetensors."
    )


def _stored_tensor(
    path: Path, name: str, entry: Any, data_start: int, file_size: int
) -> StoredTensor:
    try:
        code, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        integers = all(type(value) is int and value >= 0 for value in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{path.name}: tensor {name!r} has a malformed header entry ({error!r})."
        ) from error
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise UnsupportedModelError(
            f"{path.name}: tensor {name!r} has dtype {code!r}; supported are {', '.join(_DTYPES)}. "
            "Quantised checkpoints must be dequantised first."
        )
    tensor = StoredTensor(path, data_start + begin if integers else 0, dtype, shape)
    if not integers or tensor.nbytes != end - begin or data_start + end > file_size:
        raise UnsupportedModelError(
            f"{path.name}: tensor {name!r} ({code} {list(shape)}) does not fit bytes "
            f"{begin}..{end} of a file of {file_size}. The file is truncated or damaged."
        )
    return tensor


def _static_shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(tensor.shape.numpy())


def _transpose_later(
    tensor: ir.LazyTensor, permutation: tuple[int, ...]
) -> Callable[[], ir.TensorProtocol]:
    def compute() -> ir.TensorProtocol:
        return ir.Tensor(tensor.numpy().transpose(permutation), dtype=tensor.dtype)

    return compute
