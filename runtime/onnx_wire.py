"""The few bytes of ONNX that the runtime reads and writes without the ``onnx`` package.

An ONNX file is one protobuf message. A message is a sequence of fields, each a varint key
``number << 3 | wire_type`` and a payload (https://protobuf.dev/programming-guides/encoding).
Concatenating two messages of one type merges them: repeated fields append and embedded messages
merge. A ``ModelProto`` that holds nothing but ``graph.output`` entries therefore adds outputs to
the model it is appended to; their types are left to ONNX Runtime's inference.

Field numbers are from https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# ModelProto
_IR_VERSION, _GRAPH, _OPSET_IMPORT, _FUNCTIONS = 1, 7, 8, 25
# FunctionProto
_FUNCTION_NAME, _FUNCTION_DOMAIN = 1, 10
# GraphProto
_NODE, _GRAPH_NAME, _INITIALIZER, _INPUT, _OUTPUT = 1, 2, 5, 11, 12
# NodeProto
_NODE_INPUT, _NODE_OUTPUT, _OP_TYPE = 1, 2, 4
# TensorProto and its external_data entries
_EXTERNAL_DATA, _KEY, _VALUE = 13, 1, 2
# ValueInfoProto, TypeProto, TypeProto.Tensor, TensorShapeProto, Dimension
_NAME, _TYPE, _TENSOR_TYPE, _ELEM_TYPE, _SHAPE, _DIM, _DIM_PARAM = 1, 2, 1, 1, 2, 1, 2
_FLOAT32 = 1


def add_outputs(model: bytes, names: Iterable[str]) -> bytes:
    """``model`` with the values ``names`` of its main graph as further outputs."""
    outputs = b"".join(_field(_OUTPUT, _field(_NAME, name.encode())) for name in names)
    return model + _field(_GRAPH, outputs) if outputs else model


def value_names(model: bytes) -> frozenset[str]:
    """Names of all values that nodes of the main graph produce.

    Raises:
        ValueError: the bytes are not a protobuf message.
    """
    return frozenset(
        name.decode("utf-8", "replace")
        for node in _path(model, _GRAPH, _NODE)
        for name in _path(node, _NODE_OUTPUT)
    )


def external_locations(model: bytes) -> frozenset[str]:
    """Files that initializers of the main graph keep their data in.

    Raises:
        ValueError: the bytes are not a protobuf message.
    """
    locations: set[str] = set()
    for entry in _path(model, _GRAPH, _INITIALIZER, _EXTERNAL_DATA):
        if b"location" in _path(entry, _KEY):
            locations.update(value.decode("utf-8", "replace") for value in _path(entry, _VALUE))
    return frozenset(locations)


def overloaded_functions(model: bytes) -> frozenset[str]:
    """``domain::name`` of model-local functions that exist in more than one overload.

    Raises:
        ValueError: the bytes are not a protobuf message.
    """
    names = []
    for function in _path(model, _FUNCTIONS):
        domain, name = _path(function, _FUNCTION_DOMAIN), _path(function, _FUNCTION_NAME)
        names.append(b"::".join([*domain[-1:], *name[-1:]]).decode("utf-8", "replace"))
    return frozenset(name for name in names if names.count(name) > 1)


def matmul_model() -> bytes:
    """A model ``c = MatMul(a, b)`` over float32 matrices: how fast a GEMM runs in this session."""
    node = b"".join(
        [
            _field(_NODE_INPUT, b"a"),
            _field(_NODE_INPUT, b"b"),
            _field(_NODE_OUTPUT, b"c"),
            _field(_OP_TYPE, b"MatMul"),
        ]
    )
    graph = b"".join(
        [
            _field(_NODE, node),
            _field(_GRAPH_NAME, b"gemm"),
            _field(_INPUT, _matrix(b"a", b"rows", b"inner")),
            _field(_INPUT, _matrix(b"b", b"inner", b"columns")),
            _field(_OUTPUT, _matrix(b"c", b"rows", b"columns")),
        ]
    )
    opset = _field(1, b"") + _number(2, 13)
    return _number(_IR_VERSION, 8) + _field(_GRAPH, graph) + _field(_OPSET_IMPORT, opset)


def _matrix(name: bytes, rows: bytes, columns: bytes) -> bytes:
    shape = b"".join(_field(_DIM, _field(_DIM_PARAM, dim)) for dim in (rows, columns))
    tensor = _number(_ELEM_TYPE, _FLOAT32) + _field(_SHAPE, shape)
    return _field(_NAME, name) + _field(_TYPE, _field(_TENSOR_TYPE, tensor))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(payload)) + payload


def _path(message: bytes, *numbers: int) -> list[bytes]:
    """All payloads reached from ``message`` through the fields ``numbers``, in file order."""
    found = [memoryview(message)]
    for number in numbers:
        found = [payload for part in found for key, payload in _fields(part) if key == number]
    return [bytes(part) for part in found]


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The length-delimited fields of one message; scalars are stepped over."""
    position, end = 0, len(message)
    while position < end:
        key, position = _read_varint(message, position)
        wire_type = key & 7
        if wire_type == _VARINT:
            _, position = _read_varint(message, position)
            continue
        if wire_type == _BYTES:
            size, position = _read_varint(message, position)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError(f"not a protobuf message: wire type {wire_type}")
        if position + size > end:
            raise ValueError("not a protobuf message: a field runs past the end")
        if wire_type == _BYTES:
            yield key >> 3, message[position : position + size]
        position += size


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(message) and shift < 64:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("not a protobuf message: a number runs past the end")
