"""Checks of an untrusted ``.onnx`` before anything else looks at it.

Nothing is executed and no tensor is read; sizes are compared with the bytes that are there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from subquad.converter.newer_opsets import NEWEST_OPSET
from subquad.runtime.errors import UnsupportedModelError, UsageError

MIN_OPSET, MAX_OPSET = 13, NEWEST_OPSET

_MAX_PROTO = 2**31 - 1  # protobuf's limit for one message
_MAX_DEPTH = 16  # subgraphs inside subgraphs

_TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def read_proto(path: Path) -> onnx.ModelProto:
    """Parse ``path`` and check everything that later stages rely on.

    Raises:
        UsageError: no such file, or not a file.
        UnsupportedModelError: with the reason.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UsageError(f"{path} is not a file. Expected an .onnx file.")
        if size > _MAX_PROTO:
            raise UnsupportedModelError(
                f"{path} has {size} bytes; an .onnx file holds at most {_MAX_PROTO}. "
                "Save larger weights as external data."
            )
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist.") from error
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except (DecodeError, RecursionError) as error:
        raise UnsupportedModelError(
            f"{path.name} is no readable ONNX model: truncated, not protobuf, or nested too "
            f"deeply ({error})."
        ) from error
    if not proto.HasField("graph") or not proto.graph.node:
        raise UnsupportedModelError(f"{path.name} holds no ONNX graph.")
    _check_opset(proto, path.name)
    _check_graphs(proto, path.name)
    return proto


def external_files(proto: onnx.ModelProto, path: Path) -> dict[str, Path]:
    """Check every reference to external data; returns relative name -> resolved file.

    Raises:
        UnsupportedModelError: absolute path, path out of the model's folder (also through a
            symbolic link), missing file, or a file too short for its tensor.
    """
    root = path.parent.resolve()
    files: dict[str, Path] = {}
    for tensor in _tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        where = f"{path.name}: external data of tensor {tensor.name!r}"
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if location not in files:
            files[location] = _resolve(root, location, where)
        expected = tensor_nbytes(tensor)
        try:
            offset = int(entries.get("offset") or 0)
            length = int(entries.get("length") or expected)
        except ValueError as error:
            raise UnsupportedModelError(f"{where}: offset or length is no number.") from error
        available = files[location].stat().st_size
        if offset < 0 or length != expected or offset + length > available:
            raise UnsupportedModelError(
                f"{where}: needs {expected} bytes, the reference gives bytes "
                f"{offset}..{offset + length} of {location!r}, which has {available}."
            )
    return files


def custom_domains(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Domains of operators that are neither standard nor defined inside the model."""
    local = {(function.domain, function.name) for function in proto.functions}
    return tuple(
        sorted(
            {
                node.domain
                for nodes in _node_lists(proto)
                for node in nodes
                if node.domain not in {"", "ai.onnx"} and (node.domain, node.op_type) not in local
            }
        )
    )


def tensor_nbytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's content as raw data."""
    count: int = math.prod(tensor.dims)
    return (count * _bits(tensor.data_type) + 7) // 8


def _check_opset(proto: onnx.ModelProto, name: str) -> None:
    imports: dict[str, int] = {}
    for entry in proto.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        if imports.setdefault(domain, entry.version) != entry.version:
            raise UnsupportedModelError(f"{name} imports domain {domain!r} in two versions.")
    if "" not in imports:
        raise UnsupportedModelError(
            f"{name} does not say which opset it uses (no import of the default domain)."
        )
    if not MIN_OPSET <= imports[""] <= MAX_OPSET:
        raise UnsupportedModelError(
            f"{name} uses opset {imports['']}; supported are {MIN_OPSET} to {MAX_OPSET}. "
            "Export again with opset_version in that range."
        )
    used = {node.domain for nodes in _node_lists(proto) for node in nodes} - {"", "ai.onnx"}
    undeclared = sorted(used - set(imports) - {function.domain for function in proto.functions})
    if undeclared:
        raise UnsupportedModelError(f"{name} uses domain {undeclared[0]!r} without importing it.")


def _check_graphs(proto: onnx.ModelProto, name: str) -> None:
    opset = next(e.version for e in proto.opset_import if e.domain in {"", "ai.onnx"})
    identifiers = [(f.domain, f.name, f.overload) for f in proto.functions]
    if len(set(identifiers)) != len(identifiers):
        raise UnsupportedModelError(f"{name} defines a function twice.")
    _check_graph(proto.graph, name, opset, outer=frozenset(), depth=0)
    for function in proto.functions:
        version = next((e.version for e in function.opset_import if e.domain == ""), opset)
        _check_nodes(
            function.node,
            f"{name}: function {function.name!r}",
            version,
            defined=set(function.input),
            depth=0,
        )


def _check_graph(
    graph: onnx.GraphProto, name: str, opset: int, outer: frozenset[str], depth: int
) -> None:
    if depth > _MAX_DEPTH:
        raise UnsupportedModelError(
            f"{name} nests subgraphs more than {_MAX_DEPTH} deep, which no model needs."
        )
    if graph.sparse_initializer:
        raise UnsupportedModelError(f"{name} has sparse initializers; store them dense.")
    weights = [tensor.name for tensor in graph.initializer]
    inputs = [value.name for value in graph.input]
    for kind, names in (("initializer", weights), ("input", inputs)):
        _refuse_duplicates(names, f"{name}: {kind}")
    for tensor in graph.initializer:
        _check_tensor(tensor, name)
    defined = {*outer, *weights, *inputs}
    produced = _check_nodes(graph.node, name, opset, defined=defined, depth=depth)
    for value in graph.output:
        if value.name not in produced and value.name not in defined:
            raise UnsupportedModelError(f"{name}: nothing produces output {value.name!r}.")
    if depth == 0:
        if not graph.output:
            raise UnsupportedModelError(f"{name} has no outputs.")
        for value in (*graph.input, *graph.output):
            if any(dim.dim_value < 0 for dim in value.type.tensor_type.shape.dim):
                raise UnsupportedModelError(f"{name}: {value.name!r} has a negative dimension.")


def _check_nodes(
    nodes: Iterable[onnx.NodeProto], name: str, opset: int, defined: set[str], depth: int
) -> set[str]:
    """Names, order-independent: each value made once, nothing undefined, no cycle."""
    nodes = list(nodes)
    produced = [output for node in nodes for output in node.output if output]
    _refuse_duplicates(produced, f"{name}: value")
    clash = defined.intersection(produced)
    if clash:
        raise UnsupportedModelError(f"{name}: {min(clash)!r} is defined twice.")
    known = defined | set(produced)
    needs: list[set[str]] = []
    for node in nodes:
        label = node.name or node.op_type
        if node.domain in {"", "ai.onnx"}:
            _check_operator(node, name, opset)
        read = {value for value in node.input if value}
        for subgraph in _subgraphs(node):
            _check_graph(subgraph, name, opset, frozenset(known), depth + 1)
            read |= _outer_references(subgraph)
        for tensor in _attribute_tensors(node):
            _check_tensor(tensor, name)
        undefined = read - known
        if undefined:
            raise UnsupportedModelError(
                f"{name}: node {label!r} reads {min(undefined)!r}, which nothing defines."
            )
        needs.append(read - defined)
    _refuse_cycles(nodes, needs, name)
    return set(produced)


def _refuse_cycles(nodes: list[onnx.NodeProto], needs: list[set[str]], name: str) -> None:
    waiting = [len(read) for read in needs]
    readers: dict[str, list[int]] = {}
    for index, read in enumerate(needs):
        for value in read:
            readers.setdefault(value, []).append(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    done = 0
    while ready:
        index = ready.pop()
        done += 1
        for output in nodes[index].output:
            for reader in readers.get(output, ()):
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    ready.append(reader)
    if done != len(nodes):
        stuck = next(node for node, count in zip(nodes, waiting, strict=True) if count)
        raise UnsupportedModelError(
            f"{name}: the graph has a cycle through node {stuck.name or stuck.op_type!r}."
        )


def _check_operator(node: onnx.NodeProto, name: str, opset: int) -> None:
    try:
        schema = onnx.defs.get_schema(node.op_type, opset)
    except onnx.defs.SchemaError as error:
        raise UnsupportedModelError(
            f"{name}: operator {node.op_type!r} does not exist in opset {opset}."
        ) from error
    label = f"{name}: node {node.name or node.op_type!r}"
    if schema.deprecated:
        raise UnsupportedModelError(
            f"{name}: operator {node.op_type!r} is deprecated in opset {opset}."
        )
    if not schema.min_input <= len(node.input) <= schema.max_input:
        raise UnsupportedModelError(
            f"{label} has {len(node.input)} inputs; "
            f"{node.op_type} takes {schema.min_input} to {schema.max_input}."
        )
    given = {attribute.name: attribute for attribute in node.attribute}
    if len(given) != len(node.attribute):
        raise UnsupportedModelError(f"{label} has an attribute twice.")
    for key, attribute in given.items():
        if key not in schema.attributes:
            raise UnsupportedModelError(
                f"{label} has the attribute {key!r}, which {node.op_type} does not know in opset "
                f"{opset}."
            )
        wanted = schema.attributes[key].type.value  # type: ignore[attr-defined]
        if attribute.type != wanted and not attribute.ref_attr_name:
            kind = onnx.AttributeProto.AttributeType.Name(wanted)
            raise UnsupportedModelError(f"{label}: attribute {key!r} is not of type {kind}.")
    for key, definition in schema.attributes.items():
        if definition.required and key not in given:
            raise UnsupportedModelError(f"{label} lacks the attribute {key!r}.")


def _check_tensor(tensor: onnx.TensorProto, name: str) -> None:
    where = f"{name}: tensor {tensor.name!r}"
    if any(dim < 0 for dim in tensor.dims):
        raise UnsupportedModelError(f"{where} has a negative dimension {list(tensor.dims)}.")
    if tensor.HasField("segment"):
        raise UnsupportedModelError(f"{where} is stored in segments; save it whole.")
    if tensor.data_type == onnx.TensorProto.STRING:
        if math.prod(tensor.dims) != len(tensor.string_data):
            raise UnsupportedModelError(f"{where}: shape and number of strings differ.")
        return
    expected = tensor_nbytes(tensor)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != expected:
            raise UnsupportedModelError(
                f"{where}: shape {list(tensor.dims)} needs {expected} bytes, "
                f"{len(tensor.raw_data)} are stored."
            )
        return
    stored = sum(len(getattr(tensor, field)) for field in _TYPED_FIELDS)
    wanted = math.prod(tensor.dims)
    if tensor.data_type in {onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128}:
        wanted *= 2
    if _bits(tensor.data_type) < 8:
        wanted = expected
    if stored != wanted:
        raise UnsupportedModelError(
            f"{where}: shape {list(tensor.dims)} needs {wanted} values, {stored} are stored."
        )


def _bits(data_type: int) -> int:
    import onnx_ir as ir

    try:
        return ir.DataType(data_type).bitwidth
    except (ValueError, TypeError) as error:
        raise UnsupportedModelError(f"A tensor has the unknown dtype {data_type}.") from error


def _resolve(root: Path, location: str, where: str) -> Path:
    if not location:
        raise UnsupportedModelError(f"{where} names no file.")
    absolute = PurePosixPath(location).is_absolute() or bool(
        PureWindowsPath(location).drive or PureWindowsPath(location).root
    )
    if absolute or "\0" in location:
        raise UnsupportedModelError(
            f"{where}: {location!r} is an absolute path. External data must lie in the model's "
            "folder."
        )
    if ".." in PurePosixPath(location.replace("\\", "/")).parts:
        raise UnsupportedModelError(
            f"{where}: {location!r} leaves the model's folder. External data must lie inside it."
        )
    path = root / location
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{where}: {location!r} is missing from {root}. Copy it next to the .onnx file."
        ) from error
    if not resolved.is_relative_to(root):
        raise UnsupportedModelError(
            f"{where}: {location!r} is a symbolic link out of the model's folder."
        )
    if not resolved.is_file() or not os.access(resolved, os.R_OK):
        raise UnsupportedModelError(f"{where}: {location!r} is no readable file.")
    return resolved


def _refuse_duplicates(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for item in names:
        if item in seen:
            raise UnsupportedModelError(f"{what} {item!r} is defined twice.")
        seen.add(item)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _attribute_tensors(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors


def _outer_references(graph: onnx.GraphProto) -> set[str]:
    """Names a subgraph takes from outside."""
    inside = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    inside |= {output for node in graph.node for output in node.output}
    read = {value for node in graph.node for value in node.input if value}
    read |= {value.name for value in graph.output}
    for node in graph.node:
        for subgraph in _subgraphs(node):
            read |= _outer_references(subgraph)
    return read - inside


def _node_lists(proto: onnx.ModelProto) -> Iterator[Iterable[onnx.NodeProto]]:
    pending: list[Iterable[onnx.NodeProto]] = [proto.graph.node]
    pending += [function.node for function in proto.functions]
    while pending:
        nodes = pending.pop()
        yield nodes
        pending += [graph.node for node in nodes for graph in _subgraphs(node)]


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from proto.graph.initializer
    for nodes in _node_lists(proto):
        for node in nodes:
            yield from _attribute_tensors(node)
            for graph in _subgraphs(node):
                yield from graph.initializer
