"""Replace attention subgraphs by ``ai.subquad::Attention`` nodes, each with its proof.

1. ``Attention`` nodes and softmaxes between two products whose mask is proved: raised.
2. Anything else that looks like attention: left alone, rejected with a reason.

The raised node computes exactly what the subgraph computed, except that a query that sees no key
at all gives zeros (sources give means over masked keys, or NaN).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.passes.attention_nodes import (
    NodeBuilder,
    SharedInputs,
    needs_positions,
    register_variant,
)
from subquad.passes.recognise.candidates import Candidate, find_candidates
from subquad.passes.recognise.expressions import OpaqueError
from subquad.passes.recognise.mask import DerivedMask, MaskTerm, derive_mask
from subquad.passes.recognise.probe import ORT_ERRORS, Dimensions, probe_masks, probe_node
from subquad.passes.recognise.site import AttentionSite, Proof
from subquad.passes.recognise.subgraph import Piece
from subquad.passes.recognise.symbolic import Interpreter
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class RaisedSites:
    """What was raised, in graph order, and what was declined."""

    sites: tuple[AttentionSite, ...]
    rejections: tuple[Rejection, ...]


def raise_attention(model: ir.Model) -> RaisedSites:
    """Raise every attention of ``model`` that can be proved; modifies ``model``."""
    return _Raiser(model).run()


class _Raiser:
    """One run over one model: masks proved once each, positions shared between sites."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._interpreter = Interpreter()
        self._proved_masks: dict[object, tuple[DerivedMask, int]] = {}
        self._shared: dict[object, SharedInputs] = {}
        self._names: set[str] = set()

    def run(self) -> RaisedSites:
        sites: list[AttentionSite] = []
        rejections: list[Rejection] = []
        for found in find_candidates(self._model):
            if isinstance(found, Rejection):
                rejections.append(found)
                continue
            try:
                sites.append(self._raise(found, index=len(sites)))
            except OpaqueError as error:
                rejections.append(Rejection(str(error), where=found.anchor.name or ""))
        if sites:
            common_passes.RemoveUnusedNodesPass()(self._model)
        return RaisedSites(tuple(sites), tuple(rejections))

    def _raise(self, candidate: Candidate, index: int) -> AttentionSite:
        query = candidate.query.shape(self._interpreter)
        key = candidate.key.shape(self._interpreter)
        dims = Dimensions(query[0], query[2], key[2])
        derived, mask_probes = self._prove_mask(candidate, dims)
        sizes = candidate.sizes
        variant = AttentionVariant(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            value_dim=sizes.value_dim,
            scale=candidate.scale,
            softcap=candidate.softcap,
            window_left=derived.predicate.window_left,
            window_right=derived.predicate.window_right,
            has_key_mask=derived.predicate.key_padding,
        )
        raised = self._raised_piece(candidate, variant, derived)
        node_probes, error = probe_node(
            self._model, candidate, raised, derived.predicate, derived.padding_input, dims
        )
        name = self._site_name(candidate.anchor, index)
        source_output = candidate.output.name
        assert source_output is not None
        self._replace(candidate, variant, derived, dims, name)
        register_variant(self._model, variant)
        return AttentionSite(
            name=name,
            index=index,
            source_form=candidate.form,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            value_dim=sizes.value_dim,
            scale=candidate.scale,
            softcap=candidate.softcap,
            mask=derived.predicate,
            is_self=query[2] == key[2],
            source_output=source_output,
            output=source_output,
            proof=Proof(derived.derivation, mask_probes, node_probes, error),
        )

    def _prove_mask(self, candidate: Candidate, dims: Dimensions) -> tuple[DerivedMask, int]:
        cache_key = (candidate.masks, candidate.is_causal, dims)
        if cache_key not in self._proved_masks:
            terms = [MaskTerm(self._interpreter.tensor(v), kind) for v, kind in candidate.masks]
            derived = derive_mask(terms, dims.query_len, dims.kv_len, is_causal=candidate.is_causal)
            count = probe_masks(
                self._model, candidate, derived.predicate, derived.padding_input, dims
            )
            self._proved_masks[cache_key] = (derived, count)
        return self._proved_masks[cache_key]

    def _padding(self, derived: DerivedMask) -> ir.Value | None:
        if not derived.padding_input:
            return None
        return next(v for v in self._model.graph.inputs if v.name == derived.padding_input)

    def _raised_piece(
        self, candidate: Candidate, variant: AttentionVariant, derived: DerivedMask
    ) -> Piece:
        """A model of the raised node alone, on stand-ins for the values it reads."""
        builder, padding = NodeBuilder(), self._padding(derived)
        stand_ins: dict[ir.Value, ir.Value] = {}
        for operand in (candidate.query, candidate.key, candidate.value):
            stand_ins.setdefault(
                operand.value,
                ir.Value(name=operand.value.name, type=ir.TensorType(ir.DataType.FLOAT)),
            )
        if padding is not None:
            stand_ins[padding] = ir.Value(name=padding.name, type=padding.type, shape=padding.shape)
        query, key, value = (
            builder.operand(o, stand_ins[o.value])
            for o in (candidate.query, candidate.key, candidate.value)
        )
        mask = None if padding is None else builder.key_mask(stand_ins[padding])
        shared = SharedInputs(mask)
        if needs_positions(variant):
            positions = builder.positions(query, key, mask, derived.predicate.alignment)
            shared = SharedInputs(mask, *positions)
        output = builder.attention(variant, query, key, value, shared, name="probe")
        if candidate.query.heads:
            output = builder.packed(output)
        output.name = "subquad_probe_output"
        graph = ir.Graph(
            list(stand_ins.values()),
            [output],
            nodes=builder.nodes,
            opset_imports=dict(self._model.opset_imports),
            name="probe",
        )
        model = ir.Model(graph, ir_version=10)
        register_variant(model, variant)
        try:
            return Piece(model, list(graph.inputs), [output])
        except ORT_ERRORS as error:
            raise OpaqueError(f"ONNX Runtime cannot run the raised node: {error}") from error

    def _replace(
        self,
        candidate: Candidate,
        variant: AttentionVariant,
        derived: DerivedMask,
        dims: Dimensions,
        name: str,
    ) -> None:
        builder = NodeBuilder()
        query, key, value = (
            builder.operand(o, o.value) for o in (candidate.query, candidate.key, candidate.value)
        )
        shared = self._shared_inputs(builder, query, key, variant, derived, dims)
        output = builder.attention(variant, query, key, value, shared, name)
        if candidate.query.heads:
            output = builder.packed(output)
        old = candidate.output
        producer = old.producer()
        assert producer is not None
        output.shape = old.shape
        self._model.graph.insert_before(producer, builder.nodes)
        source_name, old.name = old.name, f"{old.name}.source"
        output.name = source_name
        ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)

    def _shared_inputs(
        self,
        builder: NodeBuilder,
        query: ir.Value,
        key: ir.Value,
        variant: AttentionVariant,
        derived: DerivedMask,
        dims: Dimensions,
    ) -> SharedInputs:
        """Key mask and positions, built once for all sites with the same lengths and padding."""
        cache_key = (derived.padding_input, derived.predicate.alignment, dims)
        shared = self._shared.get(cache_key, SharedInputs())
        padding = self._padding(derived)
        if padding is not None and shared.key_mask is None:
            shared = replace(shared, key_mask=builder.key_mask(padding))
        if needs_positions(variant) and shared.query_positions is None:
            positions = builder.positions(query, key, shared.key_mask, derived.predicate.alignment)
            shared = SharedInputs(shared.key_mask, *positions)
        self._shared[cache_key] = shared
        return shared

    def _site_name(self, anchor: ir.Node, index: int) -> str:
        """The module path where an exporter kept it, else a numbered name; unique."""
        name = _module_path(anchor) or f"attention.{index}"
        if name in self._names:
            name = f"{name}#{index}"
        self._names.add(name)
        return name


def _module_path(node: ir.Node) -> str:
    """``model.layers.0.self_attn`` from what torch's exporters record on nodes."""
    recorded = node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]")
    try:
        scopes = ast.literal_eval(recorded)
    except (ValueError, SyntaxError):
        scopes = []  # another tool wrote something else under this key
    paths = [scope for scope in scopes if isinstance(scope, str) and scope]
    if len(paths) >= 2:
        return paths[-2]  # the last one is the operator itself
    if node.name and node.name.startswith("/") and node.name.count("/") > 1:
        return node.name.rsplit("/", 1)[0].strip("/").replace("/", ".")
    return ""
