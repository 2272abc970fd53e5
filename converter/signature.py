"""Names, shapes and roles of a graph's inputs and outputs, found by following them."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from subquad.runtime.errors import UnsupportedModelError
from subquad.runtime.manifest import InputRole, InputSpec, OutputSpec
from subquad.runtime.past import PAST

# Ops an index passes through unchanged on its way to a Gather.
_INDEX_PRESERVING = frozenset(
    {"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Transpose"}
)
_MASK_NAMES = ("mask",)


def describe_signature(graph: ir.Graph) -> tuple[tuple[InputSpec, ...], tuple[OutputSpec, ...]]:
    """Specs of all inputs and outputs of ``graph``.

    Roles: a float input whose third dimension is ``past``, and that a ``Concat`` extends to an
    output of the graph, is ``past``; that output carries it on. An integer input that indexes rows
    of a weight table (``Gather`` on axis 0) is ``token_ids`` for the largest such table and ``ids``
    for the others; both get ``high``. Any other ``[batch, length]`` integer or bool input is a
    ``padding_mask``, as is a float one whose name says so. Positions are ``ids`` always. The rest
    are ``values``.

    Raises:
        UnsupportedModelError: an input or output has no dtype or no rank.
    """
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    rows = {value.name or "": _rows_indexed(value) for value in inputs}
    # A table of positions may have more rows than the vocabulary.
    tables = {name: n for name, n in rows.items() if n is not None and "position" not in name}
    vocabulary = max(tables.values(), default=None)
    token_input = next((name for name, count in tables.items() if count == vocabulary), None)
    carried = {
        value: output
        for value in inputs
        if (output := extended_to(value)) is not None and _counts_past(value)
    }
    specs = []
    for value in inputs:
        name = value.name or ""
        dtype, shape = _dtype(value, "input"), _shape(value, "input")
        role: InputRole
        if value in carried:
            role = "past"
        elif rows[name] is not None:
            role = "token_ids" if name == token_input else "ids"
        elif _may_be_padding_mask(value, shape):
            role = "padding_mask"
        elif dtype.startswith(("int", "uint")):
            role = "ids"
        else:
            role = "values"
        specs.append(InputSpec(name, dtype, shape, role, rows[name]))
    taken_by = {output: value.name or "" for value, output in carried.items()}
    outputs = []
    for value in graph.outputs:
        shape = _shape(value, "output")
        is_logits = vocabulary is not None and len(shape) >= 2 and shape[-1] == vocabulary
        outputs.append(
            OutputSpec(
                value.name or "", _dtype(value, "output"), shape, is_logits, taken_by.get(value, "")
            )
        )
    return tuple(specs), tuple(outputs)


def _counts_past(value: ir.Value) -> bool:
    assert value.shape is not None
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return dims[2] == PAST and all(isinstance(dims[axis], int) for axis in (1, 3))


def extended_to(value: ir.Value) -> ir.Value | None:
    """The output of the graph that is ``value`` with new entries behind its own."""
    if value.dtype != ir.DataType.FLOAT or value.shape is None or len(value.shape) != 4:
        return None
    for node, position in value.uses():
        if node.op_type == "Concat" and node.domain == "" and position == 0:
            output = node.outputs[0]
            if output.is_graph_output():
                return output
    return None


def _rows_indexed(value: ir.Value) -> int | None:
    """Rows of the largest 2-D table that ``value`` indexes, if any."""
    dtype = value.dtype
    if dtype not in {ir.DataType.INT64, ir.DataType.INT32}:
        return None
    found = [
        rows
        for reached in _same_indices(value)
        for node, position in reached.uses()
        if (rows := _table_rows(node, position)) is not None
    ]
    return max(found, default=None)


def _table_rows(node: ir.Node, position: int) -> int | None:
    if node.op_type != "Gather" or node.domain != "" or position != 1:
        return None
    if (node.attributes.get_int("axis") or 0) != 0:
        return None
    table = node.inputs[0]
    # Some exports cast or dequantise the table on the fly.
    while (
        table is not None
        and table.const_value is None
        and (producer := table.producer()) is not None
        and producer.op_type in {"Identity", "Cast", "DequantizeLinear"}
    ):
        table = producer.inputs[0]
    if table is None or table.const_value is None or len(table.const_value.shape) != 2:
        return None
    rows = table.const_value.shape[0]
    return rows if isinstance(rows, int) else None


def _same_indices(value: ir.Value) -> Iterable[ir.Value]:
    """``value`` and every value that holds the same indices in another shape."""
    pending, seen = [value], {id(value)}
    while pending:
        current = pending.pop()
        yield current
        for node, position in current.uses():
            if node.domain == "" and node.op_type in _INDEX_PRESERVING and position == 0:
                for output in node.outputs:
                    if id(output) not in seen:
                        seen.add(id(output))
                        pending.append(output)


def _may_be_padding_mask(value: ir.Value, shape: tuple[int | str, ...]) -> bool:
    if len(shape) != 2 or not value.uses() or "position" in (value.name or ""):
        return False
    if value.dtype in {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL}:
        return all(isinstance(dim, str) for dim in shape) or "mask" in (value.name or "").lower()
    return value.dtype == ir.DataType.FLOAT and any(
        word in (value.name or "").lower() for word in _MASK_NAMES
    )


def _dtype(value: ir.Value, what: str) -> str:
    if value.dtype is None:
        raise UnsupportedModelError(
            f"Graph {what} {value.name!r} has no tensor dtype. "
            "Sequences, maps and optionals are not supported."
        )
    if value.dtype == ir.DataType.STRING:
        raise UnsupportedModelError(
            f"Graph {what} {value.name!r} holds strings. Export the model without its tokenizer."
        )
    return str(value.dtype.numpy())


def _shape(value: ir.Value, what: str) -> tuple[int | str, ...]:
    if value.shape is None:
        raise UnsupportedModelError(
            f"Graph {what} {value.name!r} has no shape. "
            "Export with declared input and output shapes."
        )
    return tuple(
        dim if isinstance(dim, int) else dim.value or f"{value.name}_dim{axis}"
        for axis, dim in enumerate(value.shape)
    )
