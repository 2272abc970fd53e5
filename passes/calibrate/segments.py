"""Cut a raised model at its attentions, so that it can run layer by layer.

The nodes between two attentions form a segment. Segment ``i`` runs before site ``i``; the last one
ends with the model's outputs. What crosses a cut is the residual stream and a few small tensors
(rotary tables, masks, shapes), so a run holds the activations of one layer at a time.

Nodes run as late as they can, so that what few later layers need (say, keys and values made from
an encoder's output) is not carried through all layers before. Nodes with integer results, such as
shapes and masks, run as early as they can: their results are small and their inputs are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from subquad.kernels.operator import DOMAIN, OPSET
from subquad.passes.recognise.site import AttentionSite

IR_VERSION = 10

_INTEGER = frozenset(
    {onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL, onnx.TensorProto.INT8}
)
_MOVES = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"})


@dataclass(frozen=True)
class Piece:
    """A part of the model that runs as a model of its own.

    Attributes:
        nodes: in order.
        inputs: values it reads, graph inputs included; initializers are not.
        outputs: values that somebody else reads.
        weights: initializers it reads.
    """

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Projection:
    """What brings an attention's output into the residual stream.

    Attributes:
        piece: from the attention's output to ``output`` and, where there is one, ``stream``.
        output: the projected attention, linear in the attention's output (up to a bias).
        stream: ``output`` plus the residual; ``None`` if something else follows.
        weight: initializer of the last matrix product, ``[inputs, outputs]``; ``None`` if it is
            not stored that way.
        operand: what that product multiplies, and the way to it.
    """

    piece: Piece
    output: str
    stream: str | None
    weight: str | None
    operand: Piece


@dataclass(frozen=True)
class SplitSite:
    """One attention of the split model.

    Attributes:
        site: as raised.
        inputs: role (``query``, ...) -> value, for those the node has.
        output: the value that the node makes.
        node, function: the node and what it does.
        projection: how it reaches the residual stream; a reason why that is unknown.
    """

    site: AttentionSite
    inputs: Mapping[str, str]
    output: str
    node: onnx.NodeProto
    function: onnx.FunctionProto
    projection: Projection | str


class SplitModel:
    """A model and its cuts; nothing runs here.

    Attributes:
        sites: in graph order.
        segments: ``len(sites) + 1``; segment ``i`` runs before site ``i``.
        dead: values that nothing reads after site ``i`` (or the last segment) has run.
    """

    def __init__(self, model: onnx.ModelProto, sites: Sequence[AttentionSite]) -> None:
        """Split ``model``: raised and exact, with external data; one node per site in ``sites``."""
        self._model = model
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._inputs = [value.name for value in model.graph.input]
        self._outputs = [value.name for value in model.graph.output]
        self._nodes = [node for node in model.graph.node]
        self._types = {value.name: value.type.tensor_type.elem_type for value in self._typed()}
        self._producer = {name: i for i, n in enumerate(self._nodes) for name in n.output if name}
        self._reads = [tuple(dict.fromkeys(_reads(node))) for node in self._nodes]
        names = {site.name: site for site in sites}
        found = [i for i, n in enumerate(self._nodes) if n.domain == DOMAIN and n.name in names]
        assert len(found) == len(sites), "a site has no node of its own"
        self._site_nodes = {node: rank for rank, node in enumerate(found)}
        self._place = self._places()
        members: list[list[int]] = [[] for _ in range(len(found) + 1)]
        for index, place in enumerate(self._place):
            if index not in self._site_nodes:
                members[place].append(index)
        self.segments = tuple(self._piece(part) for part in members)
        self.sites = tuple(self._split_site(node, names[self._nodes[node].name]) for node in found)
        self.dead = self._dead()

    @property
    def opsets(self) -> tuple[onnx.OperatorSetIdProto, ...]:
        return tuple(self._model.opset_import)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(self._outputs)

    def model_of(
        self,
        piece: Piece,
        dtypes: Mapping[str, np.dtype[np.generic]],
        weights: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> bytes:
        """``piece`` as a model; its weights stay in the data file of the split model.

        Args:
            piece: of this model.
            dtypes: of the inputs.
            weights: replaces initializers of these names.
        """
        inputs = [
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(dtypes[name]), None
            )
            for name in piece.inputs
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in piece.outputs]
        tensors = [
            onnx.numpy_helper.from_array(weights[name], name)
            if weights and name in weights
            else self._weights[name]
            for name in piece.weights
        ]
        graph = onnx.helper.make_graph(list(piece.nodes), "piece", inputs, outputs, tensors)
        model = onnx.helper.make_model(graph, ir_version=IR_VERSION)
        model.opset_import.clear()
        model.opset_import.extend(self.opsets)
        used = {(node.domain, node.op_type) for node in piece.nodes}
        model.functions.extend(f for f in self._model.functions if (f.domain, f.name) in used)
        content: bytes = model.SerializeToString()
        return content

    def uses(self, weight: str) -> int:
        """How many nodes read an initializer."""
        return sum(weight in reads for reads in self._reads)

    def weight(self, name: str, folder: Path) -> NDArray[np.float32]:
        """An initializer as an array."""
        return np.array(onnx.numpy_helper.to_array(self._weights[name], str(folder)))

    # --- cutting ---

    def _typed(self) -> Iterator[onnx.ValueInfoProto]:
        yield from self._model.graph.value_info
        yield from self._model.graph.input
        yield from self._model.graph.output

    def _places(self) -> list[int]:
        """The segment of each node (for a site's node, its rank)."""
        level: dict[str, int] = {}
        earliest = []
        for index, node in enumerate(self._nodes):
            place = max((level.get(name, 0) for name in self._reads[index]), default=0)
            rank = self._site_nodes.get(index)
            earliest.append(place if rank is None else rank)
            for name in node.output:
                level[name] = place if rank is None else rank + 1
        latest = [len(self._site_nodes)] * len(self._nodes)
        needed: dict[str, int] = dict.fromkeys(self._outputs, len(self._site_nodes))
        places = list(earliest)
        for index in reversed(range(len(self._nodes))):
            node = self._nodes[index]
            if index not in self._site_nodes:
                latest[index] = min(needed.get(name, latest[index]) for name in node.output)
                if not all(self._types.get(name) in _INTEGER for name in node.output if name):
                    places[index] = max(earliest[index], latest[index])
            for name in self._reads[index]:
                needed[name] = min(needed.get(name, places[index]), places[index])
        return places

    def _piece(self, members: Sequence[int], wanted: Sequence[str] | None = None) -> Piece:
        """The piece of these nodes; ``wanted`` = outputs, by default all that others read."""
        inside = set(members)
        made = {name for i in members for name in self._nodes[i].output if name}
        read = [name for i in members for name in self._reads[i]]
        if wanted is None:
            outside = set(self._outputs)
            for index, reads in enumerate(self._reads):
                if index not in inside:
                    outside.update(reads)
            ordered = [name for i in members for name in self._nodes[i].output]
            wanted = [name for name in ordered if name in outside]
        free = dict.fromkeys(name for name in read if name not in made)
        return Piece(
            nodes=tuple(self._nodes[i] for i in members),
            inputs=tuple(name for name in free if name not in self._weights),
            outputs=tuple(wanted),
            weights=tuple(name for name in free if name in self._weights),
        )

    def _split_site(self, index: int, site: AttentionSite) -> SplitSite:
        node = self._nodes[index]
        function = next(
            f
            for f in self._model.functions
            if (f.domain, f.name, f.overload) == (node.domain, node.op_type, node.overload)
        )
        inputs = {r: name for r, name in zip(function.input, node.input, strict=False) if name}
        output = node.output[0]
        return SplitSite(site, inputs, output, node, function, self._projection(output))

    def _dead(self) -> tuple[tuple[str, ...], ...]:
        """Values to forget after each segment and its site."""
        last: dict[str, int] = {}
        for place, piece in enumerate(self.segments):
            for name in (*piece.inputs, *piece.outputs):
                last[name] = place
            if place < len(self.sites):
                site = self.sites[place]
                for name in (*site.inputs.values(), site.output):
                    last[name] = max(place, last.get(name, 0))
        kept = set(self._outputs)
        return tuple(
            tuple(name for name, at in last.items() if at == place and name not in kept)
            for place in range(len(self.segments))
        )

    # --- the way into the residual stream ---

    def _projection(self, start: str) -> Projection | str:
        users: dict[str, list[int]] = {}
        for index, reads in enumerate(self._reads):
            for name in reads:
                users.setdefault(name, []).append(index)
        value, weight, stream, factor = start, None, None, ""
        while len(users.get(value, ())) == 1 and value not in self._outputs:
            node = self._nodes[users[value][0]]
            others = [name for name in node.input if name != value]
            fixed = all(self._is_constant(name) for name in others)
            first = node.input[:1] == [value]
            kind = "" if node.domain else node.op_type
            if kind == "Add" and len(others) == 1 and not fixed:
                stream = node.output[0]
                break
            moves = kind in _MOVES and first
            scales = kind in ("Add", "Mul") or (kind == "Div" and first)
            multiplies = kind in ("MatMul", "Gemm") and first
            if not (moves or (fixed and (scales or multiplies))):
                break
            if multiplies:
                factor = value
                # Gemm may transpose its weights, so they are not ``[inputs, outputs]``.
                weight = node.input[1] if kind == "MatMul" else None
            value = node.output[0]
        if not factor:
            return "no product with constant weights follows the attention"
        for targets in ([value, stream], [value]):
            named = [name for name in targets if name is not None]
            members = self._needed(named, start)
            piece = self._piece(members, named)
            if self._available(piece, start):
                return Projection(
                    piece,
                    value,
                    stream if stream in named else None,
                    weight if weight in self._weights else None,
                    self._piece(self._needed([factor], start), [factor]),
                )
        return "the projection needs values of later attentions"

    def _available(self, piece: Piece, start: str) -> bool:
        """Whether all inputs exist when the attention that makes ``start`` has run."""
        rank = self._site_nodes[self._producer[start]]
        for name in piece.inputs:
            index = self._producer.get(name)
            if name == start or index is None:
                continue
            if index in self._site_nodes:
                if self._site_nodes[index] >= rank:
                    return False
            elif self._place[index] > rank:
                return False
        return True

    def _is_constant(self, name: str) -> bool:
        if name in self._weights:
            return True
        index = self._producer.get(name)
        return index is not None and self._nodes[index].op_type == "Constant"

    def _needed(self, targets: Iterable[str], start: str) -> list[int]:
        """Nodes that make ``targets`` from ``start`` and from what exists when it is made."""
        rank = self._site_nodes[self._producer[start]]
        wanted, stack = set[int](), list(targets)
        while stack:
            index = self._producer.get(stack.pop())
            if index is None or index in wanted or index in self._site_nodes:
                continue
            if self._place[index] <= rank:
                continue  # it is there already
            wanted.add(index)
            stack.extend(self._reads[index])
        return sorted(wanted)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Values that a node reads, those of its subgraphs' surroundings included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {value.name for value in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                yield from (name for name in _reads(inner) if name not in own)
                own.update(inner.output)


def load_split(folder: Path, name: str, sites: Sequence[AttentionSite]) -> SplitModel:
    """Split ``folder/name``."""
    model = onnx.load(str(folder / name), load_external_data=False)
    version = next((o.version for o in model.opset_import if not o.domain), OPSET)
    assert version == OPSET, f"expected opset {OPSET}, got {version}"
    return SplitModel(model, sites)
