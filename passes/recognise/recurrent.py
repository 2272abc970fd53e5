"""Read linear attention that is written as a recurrence: a Scan or Loop that adds up ``k v^T``.

    S_t = decay * S_(t-1) + k_t v_t^T        o_t = q_t S_t

A Scan forward over the tokens, from a state of zeros whose end nobody reads, is raised; other loops
of this kind are named. Recurrent cells (``c' = f * c + i * g``) multiply element by element; here
the product is an outer one, and the state meets the query in a product that sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from subquad.passes.recognise.affine import ONE, ZERO, Affine, OpaqueError, constant
from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.candidates import Candidate, checked_sizes, int_attribute
from subquad.passes.recognise.layout import Operand
from subquad.passes.recognise.other_forms import computed_from_inputs
from subquad.passes.recognise.products import Axis, Factor, Product, ProductReader
from subquad.passes.recognise.site import LinearForm
from subquad.passes.recognise.symbolic import Interpreter

_LOOPS = ("Scan", "Loop")
_MOVES = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")
_MAX_STEPS = 8


def recurrent_attention(
    graph: ir.Graph, interpreter: Interpreter
) -> Iterator[tuple[ir.Node, Candidate | OpaqueError]]:
    """Loops whose body is linear attention: what was read, or why they are left alone."""
    for node in graph:
        body = node.attributes.get("body")
        if node.op_type not in _LOOPS or node.domain not in ("", "ai.onnx") or body is None:
            continue
        if not _adds_outer_products(body.as_graph()):
            continue
        try:
            yield node, _read_scan(node, body.as_graph(), interpreter)
        except OpaqueError as error:
            yield (
                node,
                OpaqueError(
                    f"linear attention as a recurrence: {node.op_type} adds up products of keys "
                    f"and values, one token after the other. It is not raised: {error}"
                ),
            )


# --- a Scan ------------------------------------------------------------------------------------


def _read_scan(node: ir.Node, body: ir.Graph, interpreter: Interpreter) -> Candidate:
    if node.op_type != "Scan":
        raise OpaqueError("only a Scan tells that its steps are the tokens in order")
    states = len(body.inputs) - int_attribute(node, "num_scan_inputs")
    if states != 1 or len(body.outputs) != 2:
        raise OpaqueError("it has more than one state and one result")
    for name in ("scan_input_directions", "scan_output_directions"):
        if any(_ints(node, name, len(body.inputs))):
            raise OpaqueError("it runs backwards")
    end, output = node.outputs
    if end.uses() or end.is_graph_output():
        raise OpaqueError("the state at its end is used")
    if node.inputs[0] is None or uniform(node.inputs[0], interpreter) != 0.0:
        raise OpaqueError("it begins with a state that is not zero")
    reader = ProductReader(body, interpreter)
    new = _unmoved(body.outputs[0])
    add = new.producer()
    operands = [] if add is None or add.op_type != "Add" else list(add.inputs)
    for old, update in (operands, operands[::-1]) if len(operands) == 2 else ():
        if old is None or update is None or len(reader.of(update).factors) != 2:
            continue
        if _kept(old, body.inputs[0]) is not None:
            return _candidate(node, output, body, new, old, reader.of(update), reader, interpreter)
    raise OpaqueError("its state is not a multiple of itself plus one outer product")


def _candidate(
    node: ir.Node,
    output: ir.Value,
    body: ir.Graph,
    new: ir.Value,
    old: ir.Value,
    update: Product,
    reader: ProductReader,
    interpreter: Interpreter,
) -> Candidate:
    result = reader.of(body.outputs[1])
    states = [f for f in result.factors if f.value is new]
    queries = [f for f in result.factors if f.value is not new]
    if len(states) != 1 or len(queries) != 1 or result.runs or len(result.summed) != 1:
        raise OpaqueError("its result is not a query times the state with the token's own key")
    (state,), (query,) = states, queries
    if any(f.acts != "times" for f in (*result.factors, *update.factors)):
        raise OpaqueError("something divides")
    if update.summed or len(update.axes) != 4 or len(state.axes) != 4 or len(result.axes) != 3:
        raise OpaqueError("its tokens are not [batch, heads, dim]")
    (features,) = result.summed
    key_place = state.axes.index((features,)) if (features,) in state.axes else -1
    value_places = [n for n, axis in enumerate(state.axes) if not set(axis) <= query.labels]
    if key_place < 0 or len(value_places) != 1:
        raise OpaqueError("its result is not a sum over the features of keys")
    (value_place,) = value_places
    rest = [n for n in range(4) if n not in (key_place, value_place)]
    if (
        reader.size(state.axes[rest[0]]).is_constant
        and not reader.size(state.axes[rest[1]]).is_constant
    ):
        rest.reverse()
    key_axis, value_axis = update.axes[key_place], update.axes[value_place]
    keys = [f for f in update.factors if set(key_axis) <= f.labels and key_axis]
    values = [f for f in update.factors if set(value_axis) <= f.labels and value_axis]
    if len(keys) != 1 or len(values) != 1 or keys[0] is values[0]:
        raise OpaqueError("what it adds is not a key times a value")
    batch_heads = [update.axes[n] for n in rest]
    of_state = [state.axes[n] for n in rest]
    scanned = _Scanned(node, body)
    operands = (
        scanned.operand(query, [*of_state, (features,)]),
        scanned.operand(keys[0], [*batch_heads, key_axis]),
        scanned.operand(values[0], [*batch_heads, value_axis]),
    )
    sizes = checked_sizes(*operands, interpreter)
    wanted = [state.axes[n] for n in (*rest, value_place)]
    order = [result.axes.index(axis) for axis in wanted]
    axis = _ints(node, "scan_output_axes", 1)[0] % 4
    moved = [place + (place >= axis) for place in order]
    decay = _decay(old, body.inputs[0], rest[1], sizes.num_heads, interpreter)
    return Candidate(
        form="decomposed",
        anchor=node,
        query=operands[0],
        key=operands[1],
        value=operands[2],
        masks=(),
        mask_axes=4,
        scale=float(result.scale * update.scale),
        softcap=0.0,
        is_causal=True,
        sizes=sizes,
        output=output,
        output_perm=(moved[0], moved[1], axis, moved[2]),
        linear=LinearForm("identity", "none", log_decay=decay),
    )


@dataclass(frozen=True)
class _Scanned:
    """What a body's inputs are outside: the same with an axis of tokens."""

    node: ir.Node
    body: ir.Graph

    def operand(self, factor: Factor, wanted: list[Axis]) -> Operand:
        inputs = list(self.body.inputs)[1:]
        if factor.value not in inputs or len(factor.axes) != 3:
            raise OpaqueError("a query, key or value is computed inside it")
        number = inputs.index(factor.value)
        outside = self.node.inputs[1 + number]
        if outside is None or any(axis not in factor.axes or not axis for axis in wanted):
            raise OpaqueError("its tokens are not [batch, heads, dim]")
        tokens = _ints(self.node, "scan_input_axes", len(inputs))[number] % 4
        first, second, last = (
            place + (place >= tokens) for place in (factor.axes.index(axis) for axis in wanted)
        )
        perm = (first, second, tokens, last)
        return Operand(outside, None if perm == (0, 1, 2, 3) else perm)


def _ints(node: ir.Node, name: str, count: int) -> list[int]:
    attribute = node.attributes.get(name)
    return [0] * count if attribute is None else list(attribute.as_ints())


def _unmoved(value: ir.Value) -> ir.Value:
    node = value.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _kept(old: ir.Value, state: ir.Value) -> tuple[ir.Value, ...] | None:
    """What the state is multiplied by, if anything; ``None``: ``old`` is no multiple of it."""
    old = _unmoved(old)
    if old is state:
        return ()
    node = old.producer()
    if node is None or node.op_type != "Mul":
        return None
    others = tuple(v for v in node.inputs if v is not None and _unmoved(v) is not state)
    return others if len(others) == 1 else None


def _decay(
    old: ir.Value, state: ir.Value, heads_place: int, heads: int, interpreter: Interpreter
) -> tuple[float, ...]:
    """The logarithm of what each head keeps of its state in a step."""
    factors = _kept(old, state)
    if not factors:
        return ()
    dims = interpreter.tensor(factors[0]).shape
    place = heads_place - (4 - len(dims))
    rates = []
    for head in range(heads):
        index: list[Affine] = [ZERO] * len(dims)
        for axis, dim in enumerate(dims):
            if dim == ONE:
                continue
            if axis != place:
                raise OpaqueError("its state decays by more than one number for each head")
            index[axis] = constant(head)
        term = interpreter.element(factors[0], tuple(index))
        if not isinstance(term, Affine) or not term.is_constant:
            raise OpaqueError("its state decays by what tokens say")
        if not 0 < term.constant <= 1:
            raise OpaqueError(f"its state is multiplied by {term.constant:g}")
        rates.append(math.log(term.constant))
    return tuple(rates) if any(rates) else ()


# --- which loops -------------------------------------------------------------------------------


def _adds_outer_products(body: ir.Graph) -> bool:
    computed = computed_from_inputs(body)
    states = set(body.inputs)
    for node in body:
        if node.op_type != "Add" or node.domain not in ("", "ai.onnx"):
            continue
        a, b = node.inputs
        if a is None or b is None or not _leads_to_output(node.outputs[0]):
            continue
        for old, new in ((a, b), (b, a)):
            state = _decayed(old, states)
            if state is None or not _is_outer_product(new, computed):
                continue
            if any(map(_is_contracted, (node.outputs[0], old, state))):
                return True
    return False


def _source(value: ir.Value) -> ir.Value:
    for _ in range(_MAX_STEPS):
        node = value.producer()
        if node is None or node.op_type not in _MOVES or node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


def _leads_to_output(value: ir.Value) -> bool:
    if value.is_graph_output():
        return True
    return any(
        u.node.op_type in _MOVES and u.node.outputs[0].is_graph_output() for u in value.uses()
    )


def _decayed(value: ir.Value, states: set[ir.Value]) -> ir.Value | None:
    """The state of the loop that ``value`` is, perhaps times something."""
    node = value.producer()
    operands = [value] if node is None or node.op_type != "Mul" else list(node.inputs)
    sources = [_source(v) for v in operands if v is not None]
    return next((source for source in sources if source in states), None)


def _is_outer_product(value: ir.Value, computed: set[ir.Value]) -> bool:
    node = value.producer()
    if node is None or not all(v in computed for v in node.inputs):
        return False
    if node.op_type in ("MatMul", "Einsum"):
        return len(node.inputs) == 2
    if node.op_type != "Mul":
        return False
    axes = []
    for operand in node.inputs:
        producer = None if operand is None else operand.producer()
        if producer is None or producer.op_type != "Unsqueeze" or producer.inputs[1] is None:
            return False
        tensor = ir.convenience.get_const_tensor(producer.inputs[1])
        axes.append(None if tensor is None else tuple(tensor.numpy().reshape(-1)))
    return axes[0] != axes[1]


def _is_contracted(value: ir.Value) -> bool:
    """Whether it is multiplied by something and summed."""
    for use in value.uses():
        node = use.node
        if node.op_type in ("MatMul", "Einsum"):
            return True
        if node.op_type == "Mul":
            summed = any(u.node.op_type == "ReduceSum" for u in node.outputs[0].uses())
            if summed:
                return True
    return False
