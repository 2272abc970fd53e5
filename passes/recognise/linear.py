"""Read linear attention: weights that are products of features, without a softmax.

    o_t = scale * sum_{s <= t} (q_t . k_s) v_s                  LinearAttention, update rule linear
    ((phi(q) phi(k)^T * visible) / (epsilon + its sums)) v      spelled out, with or without sums
    phi(q) (phi(k)^T v) / (phi(q) sum phi(k))                   the same, keys first
    phi(q) cumsum(phi(k) v^T) / (phi(q) cumsum(phi(k)))         the same, causal

What is spelled out is read as a sum of products (``products``), so the order in which a graph
multiplies does not matter: two sums (over the features and over the keys), three tensors, masks,
and a divisor that is the same without the values.

A feature map is part of the site where both sides have the same one of those that
``HybridAttention`` knows (``elu(x) + 1``, ``relu``). Any other will do where features cannot be
negative, and without a normaliser always: the operands are then the features, as the source
computes them.

Katharopoulos et al., 2020, https://arxiv.org/abs/2006.16236.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise.affine import Affine, OpaqueError, constant, position
from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.candidates import (
    Candidate,
    checked_sizes,
    int_attribute,
    node_input,
)
from subquad.passes.recognise.expressions import Term
from subquad.passes.recognise.feature_maps import is_never_negative, shared_map
from subquad.passes.recognise.layout import Operand, before_repetition
from subquad.passes.recognise.mask import Mask, MaskKind
from subquad.passes.recognise.products import MOVEMENT, Axis, Factor, Product, ProductReader
from subquad.passes.recognise.roles import Roles, roles_of
from subquad.passes.recognise.site import LinearForm, MaskPredicate
from subquad.passes.recognise.subgraph import region_between
from subquad.passes.recognise.symbolic import Interpreter
from subquad.passes.recognise.tensors import as_int

_MAX_STEPS = 12


def read_linear_operator(node: ir.Node, interpreter: Interpreter) -> Candidate:
    """The operator ``LinearAttention``, with no decay or the same for all tokens, and no state.

    Raises:
        OpaqueError: the decay comes from tokens, or states of earlier or later calls are used.
    """
    inputs = list(node.inputs) + [None] * (5 - len(node.inputs))
    if inputs[3] is not None and uniform(inputs[3], interpreter) != 0.0:
        raise OpaqueError("LinearAttention that goes on from a state of earlier calls")
    used = [o.name for o in node.outputs[1:] if o.uses() or o.is_graph_output()]
    if used:
        raise OpaqueError(f"the state that LinearAttention leaves is used: {used[0]}")
    heads, kv_heads = int_attribute(node, "q_num_heads"), int_attribute(node, "kv_num_heads")
    query = Operand(node_input(node, 0), heads=heads)
    key, value = (Operand(node_input(node, place), heads=kv_heads) for place in (1, 2))
    sizes = checked_sizes(query, key, value, interpreter)
    rule, log_decay = node.attributes.get("update_rule"), tuple[float, ...]()
    if rule is not None and rule.as_string() == "gated":
        log_decay = _fixed_decay(inputs[4], kv_heads, interpreter)
    scale = node.attributes.get("scale")
    given = 0.0 if scale is None else scale.as_float()
    return Candidate(
        form="LinearAttention",
        anchor=node,
        query=query,
        key=key,
        value=value,
        masks=(),
        mask_axes=4,
        scale=given or sizes.head_dim**-0.5,
        softcap=0.0,
        is_causal=True,
        sizes=sizes,
        output=node.outputs[0],
        linear=LinearForm("identity", "none", log_decay=log_decay),
    )


def _fixed_decay(
    value: ir.Value | None, kv_heads: int, interpreter: Interpreter
) -> tuple[float, ...]:
    """The logarithm of the decay of each head, where it is the same for all tokens."""
    if value is None:
        raise OpaqueError("LinearAttention (gated) without a decay")
    batch, length, width = interpreter.tensor(value).shape
    columns: list[float] = []
    for column in range(as_int(width)):
        index = position("b", batch), position("t", length), constant(column)
        try:
            columns.append(_number(interpreter.element(value, index)))
        except OpaqueError as error:
            raise OpaqueError(
                "LinearAttention (gated) is linear in the length already, with a decay for each "
                "token, where HybridAttention has one for each head: it stays as it is"
            ) from error
    each = len(columns) // kv_heads
    heads = [columns[number : number + each] for number in range(0, len(columns), each)]
    if any(len(set(head)) > 1 for head in heads):
        raise OpaqueError(
            "LinearAttention (gated) with a decay for each feature, where HybridAttention has one "
            "for each head: it stays as it is"
        )
    if max(columns) > 0:
        raise OpaqueError(
            "LinearAttention (gated) whose state grows: no operator of ours does that"
        )
    return tuple(head[0] for head in heads) if any(columns) else ()


def _number(term: Term) -> float:
    """The number a term is.

    Raises:
        OpaqueError: it varies.
    """
    if not isinstance(term, Affine) or not term.is_constant:
        raise OpaqueError(f"expected a number, got {term}")
    return float(term.constant)


# --- spelled out -------------------------------------------------------------------------------


def linear_products(
    graph: ir.Graph, interpreter: Interpreter
) -> Iterator[tuple[ir.Node, Candidate | OpaqueError]]:
    """Spelled-out linear attention: the node that completes it, and what was read or why not.

    What is no attention is passed over.
    """
    reader = ProductReader(graph, interpreter)
    found: dict[ir.Value, Roles] = {}
    moved: dict[ir.Value, ir.Value] = {}
    for node in graph:
        output = node.outputs[0]
        if not reader.is_product(output) or not (output.uses() or output.is_graph_output()):
            continue
        sources = [moved.get(v, v) for v in node.inputs if v is not None]
        if node.op_type in MOVEMENT and sources[0] in found:
            moved[output] = sources[0]
            continue
        roles = roles_of(reader.of(output), reader)
        if roles is not None:
            found[output] = roles
    whole = {v: _part_of(v, found, moved) for v in found}
    for output, roles in found.items():
        last = output.producer()
        assert last is not None
        if whole[output] is not None:
            continue  # what completes it stands for it
        if any(whole.get(moved.get(v, v), v) is None for v in last.inputs if v is not None):
            continue  # the sums are used elsewhere as well, so they stand for themselves
        try:
            yield last, _candidate(output, roles, reader, interpreter)
        except _UnknownDivisorError as error:
            yield from _undivided(output, error, found, moved, reader, interpreter)
        except OpaqueError as error:
            yield last, error


class _UnknownDivisorError(OpaqueError):
    """The sums are divided by something else: perhaps after what can be raised."""


def _undivided(
    output: ir.Value,
    error: OpaqueError,
    found: dict[ir.Value, Roles],
    moved: dict[ir.Value, ir.Value],
    reader: ProductReader,
    interpreter: Interpreter,
) -> Iterator[tuple[ir.Node, Candidate | OpaqueError]]:
    """The sums alone, whose quotient the source computes; where they stand alone."""
    node = output.producer()
    assert node is not None
    inner = [moved.get(v, v) for v in node.inputs if v is not None]
    sums = [v for v in inner if v in found and not found[v].divisors]
    if len(sums) == 1:
        producer = sums[0].producer()
        assert producer is not None
        try:
            yield producer, _candidate(sums[0], found[sums[0]], reader, interpreter)
            return
        except OpaqueError:
            pass  # the divisor is why
    yield node, error


def _part_of(
    value: ir.Value, found: dict[ir.Value, Roles], moved: dict[ir.Value, ir.Value]
) -> ir.Value | None:
    """What is computed from ``value`` alone and is attention, too."""
    ends: set[ir.Value] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        if current.is_graph_output():
            return None
        for node in {use.node for use in current.uses()}:
            if node.op_type == "Shape":
                continue
            output = node.outputs[0]
            if moved.get(output) is value:
                stack.append(output)
            else:
                ends.add(output)
    end = ends.pop() if len(ends) == 1 else None
    return end if end in found else None


def _candidate(
    output: ir.Value, roles: Roles, reader: ProductReader, interpreter: Interpreter
) -> Candidate:
    product = reader.of(output)
    node = output.producer()
    assert node is not None
    is_causal = _runs_forward(product, roles)
    sums = _Sums(product, roles, reader, interpreter)
    divisor = sums.divisor()
    _check_inner_uses(output, roles, reader)
    layout = tuple(_places(product.axes, axes) for axes in _output_orders(roles))
    arranged = _Arranged(roles, interpreter)
    query = arranged.operand(roles.query, roles.queries, roles.features)
    key = arranged.operand(roles.key, roles.keys, roles.features)
    value = arranged.operand(roles.value, roles.keys, roles.dims)
    feature_map, of_source, query, key, value = _features(
        query, key, value, divisor is not None, interpreter
    )
    scale, normaliser, epsilon, least = float(product.scale), "none", 0.0, 0.0
    if divisor is not None:
        normaliser, epsilon, least = "sum", divisor.epsilon, divisor.least
        if divisor.scale != product.scale:
            raise OpaqueError("linear attention whose quotient is scaled: no operator of ours does")
        scale = 1.0
    form: Literal["sum", "none"] = "sum" if normaliser == "sum" else "none"
    return Candidate(
        form="decomposed",
        anchor=node,
        query=query,
        key=key,
        value=value,
        masks=tuple(arranged.mask(mask) for mask in sums.masks),
        mask_axes=roles.rank,
        scale=scale,
        softcap=0.0,
        is_causal=is_causal,
        sizes=checked_sizes(query, key, value, interpreter),
        output=output,
        output_perm=layout[0],
        linear=LinearForm(feature_map, form, epsilon, least),
        features_of_source=of_source,
    )


def _output_orders(roles: Roles) -> tuple[tuple[Axis, ...], ...]:
    inner: tuple[Axis, ...] = ((roles.queries,), (roles.dims,))
    return ((roles.batch, roles.heads, *inner) if roles.rank == 4 else (roles.batch, *inner),)


def _places(axes: tuple[Axis, ...], wanted: tuple[Axis, ...]) -> tuple[int, ...] | None:
    """Where the axes of the operator's output are in the graph's; ``None``: in place."""
    left = list(range(len(axes)))
    places = []
    for axis in wanted:
        place = next(number for number in left if axes[number] == axis)
        left.remove(place)
        places.append(place)
    if len(axes) == 3 and places != [0, 1, 2]:
        raise OpaqueError("linear attention of three axes whose result is transposed")
    return None if places == sorted(places) else tuple(places)


def _runs_forward(product: Product, roles: Roles) -> bool:
    """Whether the sum over keys runs with the queries.

    Raises:
        OpaqueError: some other running sum.
    """
    if not product.runs:
        return False
    if any((run.summed, run.at) != (roles.keys, roles.queries) for run in product.runs):
        raise OpaqueError("linear attention with a running sum over something else than keys")
    for run in product.runs:
        if run.kind != "up to":
            what = {
                "before": "leaves out the query's own token",
                "from": "starts at the query's own token and runs over later ones",
                "after": "runs over later tokens",
            }[run.kind]
            raise OpaqueError(
                f"linear attention whose running sum {what}: no operator of ours does"
            )
    return True


# --- the divisor -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Divisor:
    """``max(least, epsilon + scale * sums)``, all divided by ``scale``."""

    epsilon: float
    least: float
    scale: object


class _Sums:
    """The sums over keys, and what divides them."""

    def __init__(
        self, product: Product, roles: Roles, reader: ProductReader, interpreter: Interpreter
    ) -> None:
        self._product, self._roles, self._reader = product, roles, reader
        self._interpreter = interpreter
        self._masks = {self._origin(mask): mask for mask in roles.masks}
        self.masks = tuple(self._masks.values())

    def divisor(self) -> _Divisor | None:
        """What divides the sums; ``None``: nothing does.

        Raises:
            OpaqueError: it is not the sum of the weights.
        """
        if not self._roles.divisors:
            return None
        if len(self._roles.divisors) > 1:
            raise _UnknownDivisorError("linear attention that is divided twice")
        (factor,) = self._roles.divisors
        value, epsilon, least = self._without_guards(factor.value)
        sums = self._reader.of(value)
        if sums.scale <= 0 or not self._is_own_sum(sums, factor):
            name = factor.value.name
            raise _UnknownDivisorError(
                f"linear attention that is divided by {name!r}, which is not the sum of its weights"
                " over the keys (plus a number, or at least one): no operator of ours does that"
            )
        scale = float(sums.scale)
        return _Divisor(epsilon / scale, least / scale, sums.scale)

    def _without_guards(self, value: ir.Value) -> tuple[ir.Value, float, float]:
        """The sums before a number is added, or the larger of both is taken."""
        epsilon = least = 0.0
        for _ in range(_MAX_STEPS):
            node = value.producer()
            if node is None or node.op_type not in ("Add", "Max", "Clip", "Identity"):
                break
            inputs = [v for v in node.inputs if v is not None]
            if node.op_type == "Identity":
                value = inputs[0]
                continue
            if node.op_type == "Clip":
                inner, limit = inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
                limited = len(inputs) > 2 or limit is None
                number = None if limit is None or limited else uniform(limit, self._interpreter)
            else:
                numbers = [uniform(v, self._interpreter) for v in inputs]
                known = [n for n in numbers if n is not None]
                if len(inputs) != 2 or len(known) != 1:
                    break
                number, inner = known[0], inputs[numbers.index(None)]
            # max(least, epsilon + sum) has this order only.
            if number is None or number < 0 or epsilon or (node.op_type != "Add" and least):
                break
            if node.op_type == "Add":
                epsilon = number
            else:
                least = number
            value = inner
        return value, epsilon, least

    def _is_own_sum(self, sums: Product, factor: Factor) -> bool:
        """Whether ``sums`` are those of query and key, over the same axes and masks."""
        roles = self._roles
        if len(sums.axes) != len(factor.axes):
            return False
        names: dict[int, int] = {}
        for theirs, ours in zip(sums.axes, factor.axes, strict=True):
            if len(theirs) != len(ours):
                return False
            names |= dict(zip(theirs, ours, strict=True))
        rest = list(sums.factors)
        for role in (roles.query, roles.key):
            same = next(
                (f for f in rest if f.value is role.value and _same_axes(f, role, names)), None
            )
            if same is None:
                return False
            rest.remove(same)
        summed = {names.get(label) for label in sums.summed}
        if any(f.acts == "divides" for f in rest) or summed != {roles.keys, roles.features}:
            return False
        renamed = {
            self._origin(replace(f, axes=tuple(tuple(names.get(x, -1) for x in a) for a in f.axes)))
            for f in rest
        }
        runs = {(names.get(r.summed), names.get(r.at), r.kind) for r in sums.runs}
        own = {(r.summed, r.at, r.kind) for r in self._product.runs}
        # A mask on the values as well counts once.
        return renamed == set(self._masks) and runs == own and sums.result <= set(names)

    def _origin(self, mask: Factor) -> tuple[Factor, tuple[object, ...]]:
        """A mask before it became a float, and how: exporters convert it wherever it is used."""
        types: list[object] = []
        while True:
            node = mask.value.producer()
            if node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
                types.append(node.outputs[0].dtype)
                mask = replace(mask, value=node.inputs[0])
                continue
            moved = self._reader.of(mask.value)
            if not moved.is_single or moved.factors[0].value is mask.value:
                return mask, tuple(types)
            names: dict[int, int] = {}
            for theirs, ours in zip(moved.axes, mask.axes, strict=True):
                names |= dict(zip(theirs, ours, strict=True))
            (factor,) = moved.factors
            axes = tuple(tuple(names[label] for label in axis) for axis in factor.axes)
            mask = replace(mask, value=factor.value, axes=axes)


def _same_axes(theirs: Factor, ours: Factor, names: dict[int, int]) -> bool:
    """One tensor with its axes in the same roles; notes what they are called."""
    found: dict[int, int] = {}
    for a, b in zip(theirs.axes, ours.axes, strict=True):
        if len(a) != len(b):
            return False
        found |= dict(zip(a, b, strict=True))
    if any(names.get(label, name) != name for label, name in found.items()):
        return False
    names |= found
    return True


def _check_inner_uses(output: ir.Value, roles: Roles, reader: ProductReader) -> None:
    """What would be computed anyway is not worth replacing."""
    cut = [f.value for f in (roles.query, roles.key, roles.value, *roles.masks)]
    region = region_between([output], cut)
    inner, masks = set(region.nodes), {mask.value for mask in roles.masks}
    for node in region.nodes:
        value = node.outputs[0]
        if value is output or not reader.is_product(value):
            continue
        product = reader.of(value)
        tensors = [f for f in product.factors if f.acts == "times" and len(f.labels) > 1]
        computed = [f for f in tensors if f.value not in masks]
        if len(computed) < 2 or len(product.result) < len(reader.of(output).result):
            continue  # no larger than an operand
        others = [u.node for u in value.uses() if u.node not in inner and u.node.op_type != "Shape"]
        if others or value.is_graph_output():
            raise OpaqueError(
                f"linear attention whose intermediate value {value.name!r} is used elsewhere too"
            )


# --- operands and masks ------------------------------------------------------------------------


class _Arranged:
    """Tensors in the order of axes that a candidate has; adds nodes that move axes."""

    def __init__(self, roles: Roles, interpreter: Interpreter) -> None:
        self._roles, self._interpreter = roles, interpreter

    def operand(self, factor: Factor, length: int, width: int) -> Operand:
        roles = self._roles
        wanted: tuple[Axis, ...] = ((roles.batch), roles.heads, (length,), (width,))
        if roles.rank == 3:
            wanted = (roles.batch, (length,), (width,))
        perm = _order(factor.axes, wanted)
        if roles.rank == 3:
            value = factor.value if perm in (None, (0, 1, 2)) else self._moved(factor, wanted)
            if len(factor.axes) != 3:
                value = self._moved(factor, wanted)
            return Operand(value, heads=1)
        if perm is None:
            return Operand(self._moved(factor, wanted))
        a, b, c, d = perm
        return Operand(factor.value, None if perm == (0, 1, 2, 3) else (a, b, c, d))

    def mask(self, factor: Factor) -> Mask:
        kinds: dict[str, MaskKind] = {"times": "factor", "visible": "visible", "hidden": "hidden"}
        axes, rank = self._roles.scores, len(factor.axes)
        tail = axes[len(axes) - rank :] if rank <= len(axes) else ()
        in_place = bool(tail) and all(
            axis in ((), wanted) for axis, wanted in zip(factor.axes, tail, strict=True)
        )
        value = factor.value if in_place else self._moved(factor, axes)
        return value, kinds[factor.acts]

    def _moved(self, factor: Factor, wanted: tuple[Axis, ...]) -> ir.Value:
        """``factor`` with the axes ``wanted``; of one entry where it has none of that label."""
        value = factor.value
        kept = [axis for axis in wanted if axis and axis in factor.axes]
        order = [factor.axes.index(axis) for axis in kept]
        empty = [number for number, axis in enumerate(factor.axes) if not axis]
        nodes: list[ir.Node] = []
        perm = [*empty, *order]
        if perm != sorted(perm):
            nodes.append(ir.node("Transpose", [value], {"perm": perm}))
            value = nodes[-1].outputs[0]
        if empty:
            nodes += _with_axes("Squeeze", value, list(range(len(empty))))
            value = nodes[-1].outputs[0]
        missing = [number for number, axis in enumerate(wanted) if axis not in kept]
        if missing:
            nodes += _with_axes("Unsqueeze", value, missing)
            value = nodes[-1].outputs[0]
        for node in nodes:
            node.outputs[0].type = factor.value.type
        self._insert(factor.value, nodes)
        return value

    def _insert(self, source: ir.Value, nodes: list[ir.Node]) -> None:
        node = source.producer()
        graph = self._graph()
        if node is not None:
            graph.insert_after(node, nodes)
        elif nodes:
            graph.insert_before(graph[0], nodes)

    def _graph(self) -> ir.Graph:
        values = (self._roles.query.value, self._roles.key.value, self._roles.value.value)
        graph = next(v.graph for v in values if v.graph is not None)
        assert isinstance(graph, ir.Graph)
        return graph


def _with_axes(op_type: str, value: ir.Value, axes: list[int]) -> list[ir.Node]:
    constant = ir.node("Constant", [], {"value": ir.tensor(axes, dtype=ir.DataType.INT64)})
    constant.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    return [constant, ir.node(op_type, [value, constant.outputs[0]])]


def _order(axes: tuple[Axis, ...], wanted: tuple[Axis, ...]) -> tuple[int, ...] | None:
    """The transposition that brings ``axes`` to ``wanted``; ``None``: there is none."""
    if len(axes) != len(wanted):
        return None
    left = list(range(len(axes)))
    order: list[int | None] = []
    for axis in wanted:
        place = next((n for n in left if axis and axes[n] == axis), None)
        order.append(place)
        if place is not None:
            left.remove(place)
    if any(axes[n] for n in left):
        raise OpaqueError("linear attention over a tensor with axes that were merged")
    return tuple(left.pop(0) if place is None else place for place in order)


def _features(
    query: Operand, key: Operand, value: Operand, normalised: bool, interpreter: Interpreter
) -> tuple[str, bool, Operand, Operand, Operand]:
    """The feature map, whether the source computes it, and what it is applied to."""
    grouped = before_repetition(value, interpreter)
    name, of_query, features = shared_map(query, before_repetition(key, interpreter))
    features = before_repetition(features, interpreter)
    if features.shape(interpreter)[1] == grouped.shape(interpreter)[1]:
        of_key, value = features, grouped
    else:
        # Only one of them could be read before its repetition: neither is.
        name, of_query, of_key = shared_map(query, key)
    if name != "identity" or not normalised:
        return name, False, of_query, of_key, value
    if is_never_negative(query.value, interpreter) and is_never_negative(key.value, interpreter):
        return "relu", True, of_query, of_key, value  # leaves them as they are
    return name, False, of_query, of_key, value


def check_linear(candidate: Candidate, mask: MaskPredicate) -> None:
    """What ``HybridAttention`` cannot say.

    Raises:
        OpaqueError: with the reason.
    """
    form = candidate.linear
    if form is None:
        return
    if candidate.biases:
        raise OpaqueError(
            f"linear attention under what is no mask: {candidate.biases[0].claim.reason}"
        )
    if form.normaliser == "sum" and form.feature_map == "identity":
        raise OpaqueError(
            "linear attention whose normaliser sums features of a kind that is not known: they may "
            "be negative"
        )
    if mask.window_left != UNLIMITED or mask.window_right > 0:
        raise OpaqueError(f"linear attention within a window ({mask.describe()})")
