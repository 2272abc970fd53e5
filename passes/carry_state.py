"""Attentions of a cached model that need not keep every key: what they keep instead.

Where the operator of a site has a decode step with a state of fixed size, the keys and values of
all tokens are replaced by that state as input and output of the graph, and the node by

    If no token came before:   the attention over the new tokens, and HybridState
    else:                      HybridDecode

which is a fast prefill and a step whose cost does not grow. Where there is no such step the site
goes on keeping everything, with the reason.

Lengths are read from the mask and from the token input, since the pasts that told them may be gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.hybrid_decode.semantics import (
    HybridDecodeVariant,
    HybridStateVariant,
    decoding_of,
)
from subquad.kernels.operator import UNLIMITED, OperatorVariant
from subquad.passes.attention_nodes import NodeBuilder, SharedInputs, register_variant
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection
from subquad.runtime.manifest import InputSpec, OutputSpec
from subquad.runtime.past import PAST

Steps = tuple[HybridStateVariant, HybridDecodeVariant]

INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class CarriedState:
    """What one site keeps.

    Attributes:
        removed: names of inputs and outputs that the graph no longer has.
        inputs, outputs: what it has instead.
    """

    removed: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]


def steps_of(site: AttentionSite, attention: OperatorVariant) -> Steps | Rejection:
    """The operators that carry a site from call to call in bounded memory, if there are any."""
    if not isinstance(attention, HybridVariant):
        windowed = _as_window(attention)
        if isinstance(windowed, Rejection):
            return windowed
        attention = windowed
    if not attention.has_key_mask:
        return Rejection("no mask tells how many tokens came before", where=site.name)
    return decoding_of(attention)


def _as_window(attention: OperatorVariant) -> HybridVariant | Rejection:
    """Exact attention whose own mask is a window, as the operator that has a decode step."""
    if not isinstance(attention, AttentionVariant):
        return Rejection(f"{attention.op_type} has no decode step with a state of fixed size")
    if attention.window_left == UNLIMITED:
        return Rejection("a query may see every earlier key")
    window = HybridVariant(
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.value_dim,
        attention.scale,
        window_left=attention.window_left,
        window_right=0,
        allowed_left=attention.window_left,
        allowed_right=0,
        has_key_mask=attention.has_key_mask,
    )
    plain = AttentionVariant(
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.value_dim,
        attention.scale,
        window_left=attention.window_left,
        window_right=0,
        has_key_mask=attention.has_key_mask,
    )
    if attention != plain:
        return Rejection("the decode step knows no softcap, bias, sink logits or sigmoids")
    return window


class StateCarrier:
    """Puts states in the place of pasts, site by site.

    Args:
        model: raised; its attentions not yet replaced. Modified.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._lengths: _Lengths | None = None
        self.carried: list[CarriedState] = []
        self.keeps: dict[str, str] = {}
        """Site -> what it keeps for the next call, and why no less."""

    def steps(self, node: ir.Node, site: AttentionSite, attention: OperatorVariant) -> Steps | None:
        """The operators that carry the site on in bounded memory; ``None``: it keeps all keys."""
        if site.cache is None:
            return None
        found = steps_of(site, attention)
        declined = found if isinstance(found, Rejection) else self.reason(node)
        if isinstance(found, Rejection) or declined is not None:
            assert declined is not None
            self.keeps[site.name] = f"keys and values of all tokens: {declined.reason}"
            return None
        numbers = sum(math.prod(d for d in s.dims if isinstance(d, int)) for s in found[1].state)
        self.keeps[site.name] = f"a state of {4 * numbers} bytes per row"
        return found

    def reason(self, node: ir.Node) -> Rejection | None:
        """Why the past of this node cannot go; ``None``: it can."""
        found = _extensions(node)
        if isinstance(found, Rejection):
            return found
        for past, whole in found:
            for value in (past, whole):
                for use in value.uses():
                    mine = use.node is node or use.node is whole.producer()
                    if not mine and use.node.op_type != "Shape":
                        return Rejection(f"{value.name!r} is used by {use.node.op_type} as well")
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is None or _token_axis(self._model.graph, found[0][1]) is None:
            return Rejection("no input tells how many tokens are new")
        return None

    def replace(
        self,
        node: ir.Node,
        site: AttentionSite,
        steps: Steps,
        attention: OperatorVariant,
        shared: SharedInputs,
        extra: Mapping[str, ir.Value],
    ) -> ir.Value:
        """Replace a node for which there is no ``reason``; returns the new output.

        Args:
            shared: with positions; those of the queries are used, which must not be made from
                the keys' shape.
            extra: constants of the attention.
        """
        state, decode = steps
        found = _extensions(node)
        assert not isinstance(found, Rejection) and site.cache is not None
        assert shared.key_mask is not None and shared.query_positions is not None
        lengths = self._known_lengths(shared.key_mask, found[0][1])
        query = node.inputs[0]
        assert query is not None
        new_key, new_value = (_new(whole) for _, whole in found)
        tokens = SharedInputs(lengths.new_mask, shared.query_positions, shared.query_positions)
        first = NodeBuilder()
        fresh = [
            first.operator(attention, query, new_key, new_value, tokens, extra, site.name)[0],
            *first.operator(
                state, query, new_key, new_value, tokens, extra, f"{site.name}.{state.op_type}"
            ),
        ]
        inputs, outputs = self._declare(site, decode)
        later = NodeBuilder()
        pasts = {f"past_{spec.name}": x for spec, x in zip(decode.state, inputs, strict=True)}
        step = later.operator(
            decode,
            query,
            new_key,
            new_value,
            tokens,
            {**extra, **pasts},
            f"{site.name}.{decode.op_type}",
        )
        results = _branch(site.name, lengths.is_first, (first, fresh), (later, list(step)))
        for value, result in zip(outputs, results[1:], strict=True):
            result.name, result.shape, result.type = value.name, value.shape, value.type
        self._exchange(site, found, inputs, results[1:], lengths)
        producer = results[0].producer()
        assert producer is not None
        self._model.graph.insert_before(node, producer)
        for variant in (attention, *steps):
            register_variant(self._model, variant)
        return results[0]

    def _declare(
        self, site: AttentionSite, decode: HybridDecodeVariant
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Inputs and outputs of the graph for the state; their specs are recorded."""
        cache = site.cache
        assert cache is not None
        past, present = (name.rpartition(".")[0] for name in (cache.past_key, cache.present_key))
        values: list[list[ir.Value]] = [[], []]
        inputs, outputs = [], []
        for spec in decode.state:
            shape = tuple(dim for dim in spec.dims if isinstance(dim, (int, str)))
            names = (f"{past}.{spec.name}", f"{present}.{spec.name}")
            inputs.append(InputSpec(names[0], spec.dtype, shape, "past"))
            outputs.append(OutputSpec(names[1], spec.dtype, shape, past=names[0]))
            for name, found in zip(names, values, strict=True):
                found.append(
                    ir.Value(
                        name=name,
                        type=ir.TensorType(ir.DataType.FLOAT),
                        shape=ir.Shape(
                            [ir.SymbolicDim(d) if isinstance(d, str) else d for d in shape]
                        ),
                    )
                )
        removed = (cache.past_key, cache.past_value, cache.present_key, cache.present_value)
        self.carried.append(CarriedState(removed, tuple(inputs), tuple(outputs)))
        return values[0], values[1]

    def _exchange(
        self,
        site: AttentionSite,
        found: Sequence[tuple[ir.Value, ir.Value]],
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        lengths: _Lengths,
    ) -> None:
        """Pasts go, states come, at the same place; who asked for a past's shape is answered."""
        graph = self._model.graph
        place = list(graph.inputs).index(found[0][0])
        old_inputs = [past for past, _ in found]
        old_outputs = [whole for _, whole in found]
        kept = [value for value in graph.inputs if value not in old_inputs]
        graph.inputs[:] = [*kept[:place], *inputs, *kept[place:]]
        place = list(graph.outputs).index(old_outputs[0])
        kept = [value for value in graph.outputs if value not in old_outputs]
        graph.outputs[:] = [*kept[:place], *outputs, *kept[place:]]
        for past, whole in found:
            lengths.answer(past, lengths.past)
            lengths.answer(whole, lengths.total)

    def _known_lengths(self, key_mask: ir.Value, whole: ir.Value) -> _Lengths:
        if self._lengths is None:
            found = _token_axis(self._model.graph, whole)
            assert found is not None
            self._lengths = _Lengths(self._model.graph, key_mask, *found)
        return self._lengths


class _Lengths:
    """Numbers of tokens, from inputs that stay.

    Attributes:
        past, total: ``[1]`` int64.
        new_mask: ``[batch, length]`` bool: which new tokens are real.
        is_first: scalar bool: no token came before.
    """

    def __init__(self, graph: ir.Graph, key_mask: ir.Value, tokens: ir.Value, axis: int) -> None:
        builder = NodeBuilder()
        self.total = builder.op("Shape", key_mask, dtype=INT64, start=1, end=2)
        length = builder.op("Shape", tokens, dtype=INT64, start=axis, end=axis + 1)
        self.past = builder.op("Sub", self.total, length, dtype=INT64)
        one = builder.ints([1])
        self.new_mask = builder.op(
            "Slice", key_mask, self.past, self.total, one, dtype=ir.DataType.BOOL
        )
        none = builder.op("Equal", self.past, builder.ints([0]), dtype=ir.DataType.BOOL)
        self.is_first = builder.op("Squeeze", none, builder.ints([0]), dtype=ir.DataType.BOOL)
        self._batch = builder.op("Shape", key_mask, dtype=INT64, start=0, end=1)
        self._graph = graph
        # The graph is sorted at the end: what needs them may stand before the mask.
        graph.extend(builder.nodes)

    def answer(self, value: ir.Value, length: ir.Value) -> None:
        """Give those who ask for the shape of ``value`` the sizes without it."""
        assert value.shape is not None
        for use in list(value.uses()):
            if use.node.op_type != "Shape":
                continue
            builder = NodeBuilder()
            sizes = [self._batch, builder.ints([int(value.shape[1])]), length]  # type: ignore[arg-type]
            sizes.append(builder.ints([int(value.shape[3])]))  # type: ignore[arg-type]
            start = use.node.attributes.get_int("start", 0)
            end = use.node.attributes.get_int("end", 4)
            assert start is not None and end is not None
            chosen = sizes[start:end]
            result = chosen[0]
            if len(chosen) > 1:
                result = builder.op("Concat", *chosen, dtype=INT64, axis=0)
            self._graph.extend(builder.nodes)
            ir.convenience.replace_all_uses_with(use.node.outputs[0], result)
            self._graph.remove(use.node, safe=True)


def _extensions(node: ir.Node) -> list[tuple[ir.Value, ir.Value]] | Rejection:
    """Past and whole of key and of value: ``whole = Concat(past, new)``."""
    found = []
    for value in node.inputs[1:3]:
        producer = value.producer() if value is not None else None
        if value is None or producer is None or producer.op_type != "Concat":
            return Rejection("key and value are not the past with new tokens behind it")
        past = producer.inputs[0]
        assert past is not None
        found.append((past, value))
    return found


def _new(whole: ir.Value) -> ir.Value:
    producer = whole.producer()
    assert producer is not None and producer.inputs[1] is not None
    return producer.inputs[1]


def _token_axis(graph: ir.Graph, whole: ir.Value) -> tuple[ir.Value, int] | None:
    """An input of the graph, no past, and its axis that counts the new tokens."""
    for value in graph.inputs:
        if value.shape is None or any(_names(dim) == PAST for dim in value.shape):
            continue
        for axis, dim in enumerate(value.shape):
            if (
                axis
                and whole.shape is not None
                and _names(whole.shape[2])
                in (
                    f"{PAST} + {_names(dim)}",
                    f"{_names(dim)} + {PAST}",
                )
            ):
                return value, axis
    return None


def _names(dim: int | ir.SymbolicDim) -> str:
    return str(dim) if isinstance(dim, int) else dim.value or ""


def _branch(
    prefix: str,
    condition: ir.Value,
    then: tuple[NodeBuilder, Sequence[ir.Value]],
    otherwise: tuple[NodeBuilder, Sequence[ir.Value]],
) -> Sequence[ir.Value]:
    """``If`` with the outputs of both sides."""
    for branch, (builder, _) in (("first", then), ("later", otherwise)):
        for number, inner in enumerate(builder.nodes):
            # A name of a branch must not hide one of the graph around it.
            for place, value in enumerate(inner.outputs):
                value.name = f"{prefix}.{branch}.{number}.{place}"
    graphs = [
        ir.AttrGraph(name, ir.Graph([], list(outputs), nodes=list(builder.nodes), name=name))
        for name, (builder, outputs) in zip(
            ("then_branch", "else_branch"), (then, otherwise), strict=True
        )
    ]
    node = ir.Node("", "If", [condition], graphs, num_outputs=len(then[1]), name=prefix)
    for value in node.outputs:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    return node.outputs
