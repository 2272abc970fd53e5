"""Write models that share one external data file, streaming and deterministic."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.converter.weights import identity_key
from subquad.runtime.manifest import DATA_NAME, file_record

INLINE_LIMIT = 1024
"""Tensors of at most this many bytes stay inside the ``.onnx``."""

PAGE = 4096
_SMALL_ALIGNMENT = 64
_PAGE_ALIGNED_FROM = 64 * 1024
_CHUNK = 8 * 1024 * 1024


@dataclass(frozen=True)
class _Extent:
    offset: int
    length: int


class DataFileWriter:
    """Append tensors to one file; each content is stored once.

    At most one tensor (for lazily derived ones) or one 8 MiB chunk (for stored ones) is in memory.
    """

    def __init__(self, file: BinaryIO, position: int = 0) -> None:
        self._file = file
        self._position = position
        self._hash = hashlib.sha256()
        self._by_identity: dict[object, _Extent] = {}
        self._by_content: dict[tuple[int, bytes], _Extent] = {}
        # Identity keys may hold id(); the objects must live as long as the keys.
        self._alive: list[ir.TensorProtocol] = []

    @property
    def size(self) -> int:
        return self._position

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def add(self, tensor: ir.TensorProtocol) -> _Extent:
        """Store ``tensor`` unless an equal one is there already."""
        key = identity_key(tensor)
        known = self._by_identity.get(key)
        if known is not None:
            return known
        nbytes = tensor.nbytes
        alignment = PAGE if nbytes >= _PAGE_ALIGNED_FROM else _SMALL_ALIGNMENT
        start, before = self._position, self._hash.copy()
        self._append(b"\0" * (-start % alignment))
        offset = self._position
        content = hashlib.sha256()
        for chunk in tensor_chunks(tensor):
            content.update(chunk)
            self._append(chunk)
        if self._position - offset != nbytes:
            raise ValueError(
                f"Tensor {tensor.name!r}: expected {nbytes} bytes, "
                f"got {self._position - offset}; the source changed while it was read."
            )
        extent = _Extent(offset, nbytes)
        same = self._by_content.setdefault((nbytes, content.digest()), extent)
        if same is not extent:
            self._file.seek(start)
            self._file.truncate()
            self._position, self._hash = start, before
        self._by_identity[key] = same
        self._alive.append(tensor)
        return same

    def _append(self, chunk: bytes | memoryview) -> None:
        self._file.write(chunk)
        self._hash.update(chunk)
        self._position += len(chunk)


def write_models(
    folder: Path,
    models: Mapping[str, ir.Model],
    *,
    data_name: str = DATA_NAME,
    inline_limit: int = INLINE_LIMIT,
) -> dict[str, dict[str, Any]]:
    """Write ``models`` into ``folder``; initializers above ``inline_limit`` go to one data file.

    Tensors are deduplicated by identity and content across all models, large ones start on a page
    (ONNX Runtime maps them). Same models, same bytes. The models themselves are not changed.

    Args:
        folder: existing directory; files in it are replaced.
        models: file name -> model.
        data_name: relative name of the data file; it is written even when empty.
        inline_limit: in bytes.

    Returns:
        File name -> ``{"sha256": hex digest, "size": bytes}``.
    """
    files: dict[str, dict[str, Any]] = {}
    protos: dict[str, bytes] = {}
    with open(folder / data_name, "wb") as data:
        writer = DataFileWriter(data)
        for name, model in models.items():
            external = _with_external_data(model, writer, data_name, inline_limit)
            protos[name] = ir.to_proto(external).SerializeToString(deterministic=True)
        files[data_name] = {"sha256": writer.sha256(), "size": writer.size}
    for name, content in protos.items():
        (folder / name).write_bytes(content)
        files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    return files


def copy_files(folder: Path, sources: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Copy companions (tokenizer, config) into ``folder``; returns the same as `write_models`."""
    files: dict[str, dict[str, Any]] = {}
    for source in sources:
        target = folder / source.name
        shutil.copyfile(source, target)
        content = target.read_bytes()
        files[source.name] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": len(content),
        }
    return files


def place_files(folder: Path, sources: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Copy files to relative POSIX paths under ``folder``; returns the same as `write_models`."""
    files: dict[str, dict[str, Any]] = {}
    for name, source in sources.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        files[name] = file_record(target)
    return files


def tensor_chunks(tensor: ir.TensorProtocol) -> Iterator[bytes | memoryview]:
    """The little-endian bytes of ``tensor`` in pieces of about 8 MiB.

    A stored tensor is read with plain reads, so that its file is not mapped page by page into the
    resident size of the process.
    """
    if isinstance(tensor, ir.ExternalTensor):
        yield from _file_chunks(tensor)
        return
    if tensor.dtype.itemsize < 1:  # packed 4-bit and smaller
        yield tensor.tobytes()
        return
    array = tensor.numpy()
    yield from _array_chunks(array)


def _file_chunks(tensor: ir.ExternalTensor) -> Iterator[bytes]:
    left = tensor.nbytes
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset or 0)
        while left > 0:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                return
            left -= len(chunk)
            yield chunk


def _array_chunks(array: NDArray[Any]) -> Iterator[memoryview]:
    if array.size == 0:
        return
    if array.ndim == 0:
        array = array.reshape(1)
    # Row blocks: a transposed view is made contiguous block by block, never as a whole.
    rows = max(1, _CHUNK * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        block = np.ascontiguousarray(array[start : start + rows])
        if block.dtype.byteorder == ">":
            block = block.astype(block.dtype.newbyteorder("<"))
        yield block.reshape(-1).view(np.uint8).data


def _with_external_data(
    model: ir.Model, writer: DataFileWriter, data_name: str, inline_limit: int
) -> ir.Model:
    """A copy of ``model`` (tensors shared) whose large initializers refer to the data file."""
    copy = model.clone()
    for graph in copy.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None:
                raise ValueError(f"Initializer {name!r} has no value.")
            if tensor.dtype == ir.DataType.STRING:
                continue
            if tensor.nbytes <= inline_limit:
                if isinstance(tensor, ir.ExternalTensor):
                    value.const_value = ir.Tensor(
                        np.array(tensor.numpy()), dtype=tensor.dtype, name=name
                    )
                continue
            extent = writer.add(tensor)
            value.const_value = ir.ExternalTensor(
                data_name,
                extent.offset,
                extent.length,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
            )
    return copy
