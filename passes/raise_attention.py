"""Replace attention subgraphs by nodes of ``ai.subquad``, each with its proof.

1. ``Attention`` nodes, softmaxes or sigmoids between two products, and linear attention, whose
   mask is proved: raised (the last to ``HybridAttention`` without exact keys).
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
from subquad.passes.recognise.affine import ZERO, OpaqueError
from subquad.passes.recognise.bias import Separated, joint_axes, separate
from subquad.passes.recognise.cache import cache_of
from subquad.passes.recognise.candidates import Candidate, node_label
from subquad.passes.recognise.decay import NoDecayError
from subquad.passes.recognise.find import add_twins, find_candidates
from subquad.passes.recognise.linear import check_linear
from subquad.passes.recognise.mask import DerivedMask, ScoreShape
from subquad.passes.recognise.merged import split_merged_heads
from subquad.passes.recognise.probe import (
    PADDING_ROLE,
    ROLES,
    SINK_ROLE,
    Question,
    bias_role,
    probe_masks,
    probe_node,
)
from subquad.passes.recognise.retention import as_decay, with_decay
from subquad.passes.recognise.sigmoid import fold_sigmoid, without_offset
from subquad.passes.recognise.site import AttentionSite, MaskPredicate, Proof, SiteCache
from subquad.passes.recognise.softmax import fold_softmax
from subquad.passes.recognise.speller import Twin
from subquad.passes.recognise.subgraph import Piece
from subquad.passes.recognise.symbolic import Interpreter, TableInterpreter
from subquad.passes.site_variant import ExactVariant, linear_variant
from subquad.runtime.errors import Rejection, UnsupportedModelError

# From here on axes of Squeeze, ReduceMean and the like are inputs, and softmax has one axis.
_OLDEST_OPSET = 18


@dataclass(frozen=True)
class RaisedSites:
    """What was raised, in graph order, and what was declined."""

    sites: tuple[AttentionSite, ...]
    rejections: tuple[Rejection, ...]


def raise_attention(model: ir.Model) -> RaisedSites:
    """Raise every attention of ``model`` that can be proved; modifies ``model``.

    Args:
        model: opset 18 or later, with known shapes and types (the converter sees to both).

    Raises:
        UnsupportedModelError: an older opset, in which operators mean other things.
    """
    version = model.opset_imports.get("")
    if version is not None and version < _OLDEST_OPSET:
        raise UnsupportedModelError(
            f"attention is recognised from opset {_OLDEST_OPSET} on, the model has {version}. "
            "Convert it first: onnx.version_converter.convert_version(model, 24)."
        )
    return _Raiser(model).run()


@dataclass(frozen=True)
class _Proved:
    """A candidate with all its claims shown to hold."""

    candidate: Candidate
    shape: ScoreShape
    derived: DerivedMask
    variant: ExactVariant
    proof: Proof
    cache: SiteCache | None


class _Raiser:
    """One run over one model: first everything is proved, then the graph is changed."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._interpreter = Interpreter()
        self._tables = TableInterpreter()
        self._masks: dict[object, tuple[Separated, int] | OpaqueError] = {}
        self._pieces: dict[object, Piece] = {}
        self._shared: dict[object, SharedInputs] = {}
        self._biases: dict[object, ir.Value] = {}
        self._slopes: dict[tuple[float, ...], ir.Value] = {}
        self._replaced: dict[ir.Value, ir.Value] = {}
        self._names: set[str] = set()
        self._twins: dict[ir.Node, Twin] = {}

    def run(self) -> RaisedSites:
        self._interpreter.add_types(self._model.graph)
        fold_softmax(self._model, self._interpreter)
        fold_sigmoid(self._model)
        split_merged_heads(self._model, self._interpreter)
        proved: list[_Proved] = []
        rejections: list[Rejection] = []
        twins = add_twins(self._model, self._interpreter)
        self._twins = {node: twin for node, twin in twins.items() if isinstance(twin, Twin)}
        for found in find_candidates(self._model, self._interpreter, twins):
            if isinstance(found, Rejection):
                rejections.append(found)
                continue
            try:
                proved.append(self._prove(found))
            except OpaqueError as error:
                rejections.append(Rejection(str(error), where=node_label(found.anchor)))
        sites = tuple(self._raise(item, index) for index, item in enumerate(proved))
        if sites or twins:
            common_passes.RemoveUnusedNodesPass()(self._model)
            # A node is inserted where its output was made: shared inputs may be needed earlier.
            self._model.graph.sort()
        return RaisedSites(sites, tuple(rejections))

    # --- proving ---

    def _prove(self, candidate: Candidate) -> _Proved:
        shape = candidate.score_shape(self._interpreter)
        try:
            separated, mask_probes = self._prove_mask(candidate, shape)
        except OpaqueError as error:
            candidate, separated, mask_probes = self._prove_decay(candidate, shape, error)
        derived = separated.derived
        candidate = replace(
            candidate, masks=separated.masks, biases=separated.biases, alibi=separated.alibi
        )
        candidate = without_offset(candidate, self._interpreter)
        check_linear(candidate, derived.predicate)
        variant = _variant_of(candidate, derived.predicate)
        question = Question(self._model, self._interpreter, candidate, shape, derived)
        probes = probe_node(question, self._raised_piece(candidate, variant, derived))
        proof = Proof(
            derived.derivation, mask_probes, probes.count, probes.max_error, probes.empty_rows
        )
        cache = None
        # Queries at the first keys do not follow the past.
        if derived.predicate.alignment == "end":
            twin = self._twins.get(candidate.anchor)
            outputs = {} if twin is None else {new: old for old, new in twin.outputs.items()}
            cache = cache_of(
                candidate.key, candidate.value, shape.query_len, self._interpreter, outputs
            )
        return _Proved(candidate, shape, derived, variant, proof, cache)

    def _prove_decay(
        self, candidate: Candidate, shape: ScoreShape, failure: OpaqueError
    ) -> tuple[Candidate, Separated, int]:
        """What is no mask may be a decay; ``failure`` says why it is no mask."""
        decaying = as_decay(candidate, shape, self._interpreter)
        if decaying is None:
            raise failure
        try:
            separated, mask_probes = self._prove_mask(decaying, shape)
            predicate = separated.derived.predicate
            return (
                with_decay(decaying, shape, predicate, self._interpreter),
                separated,
                mask_probes,
            )
        except NoDecayError:
            raise
        except OpaqueError:
            raise failure from None

    def _prove_mask(self, candidate: Candidate, shape: ScoreShape) -> tuple[Separated, int]:
        counted = _counts_constants(candidate)
        cache_key = (*(candidate.masks, candidate.mask_axes, candidate.is_causal, shape, counted),)
        if cache_key not in self._masks:
            try:
                self._masks[cache_key] = self._derive_and_probe(candidate, shape)
            except OpaqueError as error:
                self._masks[cache_key] = error
        known = self._masks[cache_key]
        if isinstance(known, OpaqueError):
            raise known
        return known

    def _derive_and_probe(self, candidate: Candidate, shape: ScoreShape) -> tuple[Separated, int]:
        separated = separate(
            self._interpreter,
            candidate.masks,
            shape,
            self._tables,
            is_causal=candidate.is_causal,
            beside_sinks=_counts_constants(candidate),
        )
        self._check_padding_input(separated.derived, shape)
        candidate = replace(candidate, masks=separated.masks)
        question = Question(self._model, self._interpreter, candidate, shape, separated.derived)
        return separated, probe_masks(question)

    def _check_padding_input(self, derived: DerivedMask, shape: ScoreShape) -> None:
        """The node reads the input itself: it must have one column for each key."""
        padding = self._padding(derived)
        if padding is None:
            return
        columns = self._interpreter.tensor(padding).shape[1]
        difference = columns - shape.kv_len
        if difference.is_constant and difference != ZERO:
            raise OpaqueError(
                f"padding input {padding.name!r} has {columns} columns for {shape.kv_len} keys"
            )

    def _padding(self, derived: DerivedMask) -> ir.Value | None:
        if not derived.padding_input:
            return None
        return next(v for v in self._model.graph.inputs if v.name == derived.padding_input)

    def _raised_piece(
        self, candidate: Candidate, variant: ExactVariant, derived: DerivedMask
    ) -> Piece:
        """A model of the raised node alone, fed by role; shared by sites of one kind."""
        operands, broadcast = candidate.operands, candidate.broadcast(self._interpreter)
        layout = tuple((operand.perm, operand.heads) for operand in operands)
        alignment, sinks = derived.predicate.alignment, candidate.sinks
        slopes = () if candidate.alibi is None else candidate.alibi.slopes
        columns = None if sinks is None else (sinks.indices, sinks.number)
        ranks = [len(self._interpreter.tensor(bias.value).shape) for bias in candidate.biases]
        terms = tuple((bias.kind, rank) for bias, rank in zip(candidate.biases, ranks, strict=True))
        cache_key = (
            *(variant, layout, broadcast, alignment, candidate.mask_axes, candidate.output_perm),
            *(terms, slopes, columns, candidate.linear),
        )
        if cache_key in self._pieces:
            return self._pieces[cache_key]
        builder = NodeBuilder()
        inputs = [ir.Value(name=role, type=ir.TensorType(ir.DataType.FLOAT)) for role in ROLES]
        query, key, value = builder.operands(operands, inputs, broadcast)
        mask: ir.Value | None = None
        if variant.has_key_mask:
            mask = ir.Value(name=PADDING_ROLE, type=ir.TensorType(ir.DataType.BOOL))
            inputs.append(mask)
        shared = SharedInputs(mask)
        if needs_positions(variant):
            shared = SharedInputs(mask, *builder.positions(query, key, mask, alignment))
        if terms:
            biases = [
                ir.Value(
                    name=bias_role(number),
                    type=ir.TensorType(
                        ir.DataType.FLOAT if kind == "additive" else ir.DataType.BOOL
                    ),
                )
                for number, (kind, _) in enumerate(terms)
            ]
            inputs.extend(biases)
            total = builder.score_bias(
                [(value, *term) for value, term in zip(biases, terms, strict=True)],
                score_axes=candidate.mask_axes,
            )
            shared = replace(shared, score_bias=total)
        if slopes:
            shared = replace(shared, slopes=builder.floats(slopes))
        if candidate.linear is not None and candidate.linear.log_decay:
            shared = replace(shared, log_decay=builder.floats(candidate.linear.log_decay))
        if sinks is not None:
            logits: ir.Value | None = None
            if sinks.value is not None:
                logits = ir.Value(name=SINK_ROLE, type=ir.TensorType(ir.DataType.FLOAT))
                inputs.append(logits)
            shared = replace(
                shared, sink_logits=builder.sink_logits(sinks, logits, variant.num_heads)
            )
        output = builder.attention(variant, query, key, value, shared, name="probe")
        output = _in_layout(builder, output, candidate)
        output.name = "output"
        graph = ir.Graph(
            inputs,
            [output],
            nodes=builder.nodes,
            opset_imports=dict(self._model.opset_imports),
            name="probe",
        )
        model = ir.Model(graph, ir_version=10)
        register_variant(model, variant)
        self._pieces[cache_key] = Piece(model, inputs, [output])
        return self._pieces[cache_key]

    # --- changing the graph ---

    def _raise(self, proved: _Proved, index: int) -> AttentionSite:
        candidate, sizes = proved.candidate, proved.candidate.sizes
        name = self._site_name(candidate.anchor, index)
        twin = self._twins.get(candidate.anchor)
        source_output = (candidate.output if twin is None else twin.fused.outputs[0]).name
        assert source_output is not None
        self._replace(proved, name)
        if twin is not None:
            for old, new in twin.outputs.items():
                self._substitute(old, self._replaced.get(new, new))
        register_variant(self._model, proved.variant)
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
            mask=proved.derived.predicate,
            is_self=proved.shape.query_len == proved.shape.kv_len or proved.cache is not None,
            source_output=source_output,
            output=source_output,
            proof=proved.proof,
            biases=tuple(bias.claim for bias in candidate.biases),
            alibi="none" if candidate.alibi is None else candidate.alibi.kind,
            slopes=() if candidate.alibi is None else candidate.alibi.slopes,
            has_sinks=candidate.sinks is not None,
            score_function=candidate.score_function,
            score_offset=candidate.score_offset,
            linear=candidate.linear,
            cache=proved.cache,
        )

    def _replace(self, proved: _Proved, name: str) -> None:
        candidate, builder = proved.candidate, NodeBuilder()
        query, key, value = builder.operands(
            candidate.operands,
            [self._replaced.get(o.value, o.value) for o in candidate.operands],
            candidate.broadcast(self._interpreter),
        )
        shared = self._shared_inputs(builder, query, key, proved)
        output = builder.attention(proved.variant, query, key, value, shared, name)
        output = _in_layout(builder, output, candidate)
        old = candidate.output
        producer = old.producer()
        assert producer is not None
        self._model.graph.insert_before(producer, builder.nodes)
        self._substitute(old, output)

    def _substitute(self, old: ir.Value, new: ir.Value) -> None:
        """``new`` takes the place and the name of ``old``."""
        new.shape = old.shape
        name, old.name = old.name, f"{old.name}.source"
        new.name = name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self._replaced[old] = new

    def _shared_inputs(
        self, builder: NodeBuilder, query: ir.Value, key: ir.Value, proved: _Proved
    ) -> SharedInputs:
        """Key mask and positions, built once for all sites with the same lengths and padding."""
        derived, shape = proved.derived, proved.shape
        cache_key = (
            derived.padding_input,
            derived.padding_test,
            derived.predicate.alignment,
            (shape.batch, shape.query_len, shape.kv_len),
        )
        shared = self._shared.get(cache_key, SharedInputs())
        padding = self._padding(derived)
        if padding is not None and shared.key_mask is None:
            shared = replace(shared, key_mask=_key_mask(builder, padding, derived))
        if needs_positions(proved.variant) and shared.query_positions is None:
            positions = builder.positions(
                query,
                key,
                shared.key_mask,
                derived.predicate.alignment,
                # A cache may come to keep less than all keys.
                counted_by_mask=proved.cache is not None,
            )
            shared = SharedInputs(shared.key_mask, *positions)
        self._shared[cache_key] = shared
        candidate = proved.candidate
        if candidate.biases:
            shared = replace(shared, score_bias=self._score_bias(builder, candidate))
        if candidate.alibi is not None:
            slopes = candidate.alibi.slopes
            if slopes not in self._slopes:
                self._slopes[slopes] = builder.floats(slopes)
            shared = replace(shared, slopes=self._slopes[slopes])
        if candidate.linear is not None and candidate.linear.log_decay:
            shared = replace(shared, log_decay=builder.floats(candidate.linear.log_decay))
        if candidate.sinks is not None:
            logits = builder.sink_logits(
                candidate.sinks, candidate.sinks.value, proved.variant.num_heads
            )
            shared = replace(shared, sink_logits=logits)
        return shared

    def _score_bias(self, builder: NodeBuilder, candidate: Candidate) -> ir.Value:
        """The sum of all biases, built once for all sites that share them."""
        cache_key = (candidate.mask_axes, *((bias.value, bias.kind) for bias in candidate.biases))
        if cache_key not in self._biases:
            terms = [
                (bias.value, bias.kind, len(self._interpreter.tensor(bias.value).shape))
                for bias in candidate.biases
            ]
            self._biases[cache_key] = builder.score_bias(terms, score_axes=candidate.mask_axes)
        return self._biases[cache_key]

    def _site_name(self, anchor: ir.Node, index: int) -> str:
        """The module path where an exporter kept it, else a numbered name; unique."""
        name = _module_path(anchor) or f"attention.{index}"
        if name in self._names:
            name = f"{name}#{index}"
        self._names.add(name)
        return name


def _variant_of(candidate: Candidate, mask: MaskPredicate) -> ExactVariant:
    """The operator that computes what was read."""
    of = candidate.sizes
    sizes = (of.num_heads, of.num_kv_heads, of.head_dim, of.value_dim)
    if candidate.linear is not None:
        return linear_variant(sizes, candidate.scale, mask, candidate.linear)
    return AttentionVariant(
        *sizes,
        scale=candidate.scale,
        softcap=candidate.softcap,
        window_left=mask.window_left,
        window_right=mask.window_right,
        has_key_mask=mask.key_padding,
        score_bias=joint_axes(candidate.biases, candidate.score_function),
        alibi="none" if candidate.alibi is None else candidate.alibi.kind,
        has_sink_logits=candidate.sinks is not None,
        score_function=candidate.score_function,
        score_offset=candidate.score_offset,
    )


def _in_layout(builder: NodeBuilder, output: ir.Value, candidate: Candidate) -> ir.Value:
    """The result of a node with the axes that the source's has."""
    if candidate.query.heads:
        return builder.packed(output)
    if candidate.output_perm is None:
        return output
    perm = [candidate.output_perm.index(axis) for axis in range(len(candidate.output_perm))]
    return builder.op("Transpose", output, perm=perm)


def _counts_constants(candidate: Candidate) -> bool:
    """Whether what is constant along a row of scores shows in the result."""
    return candidate.sinks is not None or candidate.score_function == "sigmoid"


def _key_mask(builder: NodeBuilder, padding: ir.Value, derived: DerivedMask) -> ir.Value:
    """Real keys as the source tells them: it may compare with one where we would cast."""
    if derived.padding_test == "nonzero":
        return builder.key_mask(padding)
    as_float = builder.op("Cast", padding, to=int(ir.DataType.FLOAT))
    limit = builder.op("Constant", value_float=1.0 if derived.padding_test == "one" else 0.0)
    op_type = "Equal" if derived.padding_test == "one" else "Greater"
    return builder.op(op_type, as_float, limit, dtype=ir.DataType.BOOL)


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
