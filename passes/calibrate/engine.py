"""Run a split model with a method of choice at every attention.

Every attention runs as a model of its own, made by the passes that make the artifact: what is
measured is what ships. Batches go through the model side by side, one segment at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.host.build import KernelBuild, build_kernels
from subquad.kernels.host.targets import host_targets
from subquad.kernels.operator import DOMAIN, OperatorVariant
from subquad.passes.calibrate.segments import IR_VERSION, Piece, SplitModel, SplitSite
from subquad.passes.lower import lower_sites
from subquad.passes.methods import dense
from subquad.passes.plan import Assignment
from subquad.passes.replace import replace_sites
from subquad.runtime.session import QUIET_THREADS, open_session, run_session

Array = NDArray[Any]
State = dict[str, Array]
"""Values that exist at one moment of a run of one batch."""

Visitor = Callable[[int, Sequence[State]], None]
"""Called before a site runs, with its rank and the states of all batches."""

Finish = Callable[[int, Mapping[str, Array]], None]
"""Called with each batch's number and outputs."""

OPEN_ATTENTIONS = 16
"""Sessions of attentions that are kept open."""

_SITE = "site"

BLOCK_COUNTS = "block_counts"
"""What a selector gives an attention, int32: the length of each list of key blocks."""


@dataclass(frozen=True)
class SiteResult:
    """One attention on one batch.

    Attributes:
        output: as the site's node makes it.
        kept: how many blocks of keys a selector has kept, per query head; ``None`` without one.
    """

    output: NDArray[np.float32]
    kept: NDArray[np.int64] | None = None


@dataclass
class _Opened:
    session: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class _SiteModel:
    """One attention as a model: equal contents have equal keys."""

    content: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    library: Path | None

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass
class Engine:
    """Runs the pieces of one split model; keeps the sessions it has opened.

    Attributes:
        split: the model.
        folder: of its data file.
        threads: per operator; ``None`` = ONNX Runtime's choice.
        kernels: whether attentions run as compiled kernels where they can.
        weights: initializers to run with instead of the model's own.
    """

    split: SplitModel
    folder: Path
    threads: int | None = None
    kernels: bool = False
    weights: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    _pieces: dict[str, _Opened] = field(default_factory=dict)
    _attentions: dict[str, _Opened] = field(default_factory=dict)
    _models: dict[tuple[int, str, str], _SiteModel] = field(default_factory=dict)

    def close(self) -> None:
        """Give back the memory of all sessions; they are opened again when they are needed."""
        self._pieces.clear()
        self._attentions.clear()

    def fresh(self) -> Engine:
        """One that shares the sessions of attentions, but none that weights may change."""
        return dataclasses.replace(self, weights={}, _pieces={})

    def run(
        self,
        batches: Sequence[Mapping[str, Array]],
        plan: Mapping[int, Assignment],
        *,
        visit: Visitor | None = None,
        finish: Finish | None = None,
    ) -> None:
        """All batches through the model.

        Args:
            batches: graph input -> array.
            plan: rank of a site -> what computes it; the others are exact.
            visit: sees the states before each site.
            finish: takes the outputs; without it the run ends at the last site.
        """
        states: list[State] = [dict(feeds) for feeds in batches]
        self._forward(states, 0, plan, visit, finish)

    def run_from(
        self,
        rank: int,
        states: Sequence[State],
        outputs: Sequence[Array],
        plan: Mapping[int, Assignment],
        *,
        finish: Finish,
    ) -> None:
        """The rest of the model after site ``rank`` gave ``outputs``; ``states`` are left alone."""
        copies = [dict(state) for state in states]
        for state, output in zip(copies, outputs, strict=True):
            self._settle(rank, state, output)
        self._forward(copies, rank + 1, plan, None, finish)

    def attention(self, rank: int, state: State, assignment: Assignment | None) -> SiteResult:
        """Site ``rank`` computed by ``assignment``, or exactly."""
        split_site = self.split.sites[rank]
        values = {role: state[name] for role, name in split_site.inputs.items()}
        opened = self._attention(split_site, assignment, values)
        feeds = {role: values[role] for role in opened.inputs}
        output, *rest = run_session(opened.session, feeds, opened.outputs)
        kept = rest[0].sum(axis=(0, 2), dtype=np.int64) if rest else None
        return SiteResult(output, kept)

    def project(self, rank: int, state: State, output: Array) -> tuple[Array, Array | None]:
        """The attention's output after its projection, and the residual stream with it.

        A site without a known projection: ``output`` itself, and no stream.
        """
        projection = self.split.sites[rank].projection
        if isinstance(projection, str):
            return output, None
        values = {**state, self.split.sites[rank].output: output}
        opened = self._piece(f"projection {rank}", projection.piece, values)
        feeds = {name: values[name] for name in opened.inputs}
        found = dict(
            zip(opened.outputs, run_session(opened.session, feeds, opened.outputs), strict=True)
        )
        stream = found[projection.stream] if projection.stream is not None else None
        return found[projection.output], stream

    def operand(self, rank: int, state: State, output: Array) -> Array:
        """What the weights of the site's projection multiply, ``[..., inputs]``."""
        projection = self.split.sites[rank].projection
        assert not isinstance(projection, str)
        values = {**state, self.split.sites[rank].output: output}
        if not projection.operand.nodes:
            return output
        opened = self._piece(f"operand {rank}", projection.operand, values)
        feeds = {name: values[name] for name in opened.inputs}
        found: Array = run_session(opened.session, feeds, opened.outputs)[0]
        return found

    # --- running ---

    def _forward(
        self,
        states: list[State],
        first: int,
        plan: Mapping[int, Assignment],
        visit: Visitor | None,
        finish: Finish | None,
    ) -> None:
        last = len(self.split.sites)
        for rank in range(first, last):
            for state in states:
                self._segment(rank, state)
            if visit is not None:
                visit(rank, states)
            for state in states:
                self._settle(rank, state, self.attention(rank, state, plan.get(rank)).output)
        if finish is None:
            return
        for number, state in enumerate(states):
            # One by one: logits are larger than everything else.
            copy = dict(state)
            self._segment(last, copy)
            finish(number, {name: copy[name] for name in self.split.output_names})

    def _segment(self, rank: int, state: State) -> None:
        piece = self.split.segments[rank]
        if not piece.nodes:
            return
        opened = self._piece(f"segment {rank}", piece, state)
        feeds = {name: state[name] for name in opened.inputs}
        values = run_session(opened.session, feeds, opened.outputs)
        state.update(zip(opened.outputs, values, strict=True))

    def _settle(self, rank: int, state: State, output: Array) -> None:
        """Put a site's output into the state and forget what nobody reads any more."""
        state[self.split.sites[rank].output] = output
        for name in self.split.dead[rank]:
            state.pop(name, None)

    def _piece(self, key: str, piece: Piece, state: Mapping[str, Array]) -> _Opened:
        if key not in self._pieces:
            dtypes = {name: state[name].dtype for name in piece.inputs}
            model = self.split.model_of(piece, dtypes, self.weights)
            session = self._open(model)
            self._pieces[key] = _Opened(session, piece.inputs, piece.outputs)
        return self._pieces[key]

    def _attention(
        self, split_site: SplitSite, assignment: Assignment | None, values: Mapping[str, Array]
    ) -> _Opened:
        place = (split_site.site.index, "", "")
        if assignment is not None:
            digest = "" if assignment.fitted is None else assignment.fitted.digest
            place = (split_site.site.index, assignment.text, digest)
        if place not in self._models:
            dtypes = {role: array.dtype for role, array in values.items()}
            self._models[place] = _site_model(
                self.split, split_site, assignment, dtypes, self.kernels
            )
        model = self._models[place]
        opened = self._attentions.pop(model.key, None)
        if opened is None:
            if len(self._attentions) >= OPEN_ATTENTIONS:
                del self._attentions[next(iter(self._attentions))]
            libraries = () if model.library is None else (model.library,)
            opened = _Opened(self._open(model.content, libraries), model.inputs, model.outputs)
        self._attentions[model.key] = opened  # the last one used is the last to go
        return opened

    def _open(self, model: bytes, libraries: Sequence[Path] = ()) -> Any:
        return open_session(
            model,
            folder=self.folder,
            threads=self.threads,
            config=QUIET_THREADS,
            libraries=libraries,
            # Every session would keep the memory of its largest run, and there are many.
            arena=False,
        )


def site_variants(assignment: Assignment) -> tuple[OperatorVariant, ...]:
    """Operators that compute a site, the attention last."""
    method, site, params = assignment.method, assignment.site, assignment.params
    return (*method.prepare(site, params), method.lower(site, params))


def _site_model(
    split: SplitModel,
    split_site: SplitSite,
    assignment: Assignment | None,
    dtypes: Mapping[str, np.dtype[np.generic]],
    kernels: bool,
) -> _SiteModel:
    """Model of one attention; its inputs are roles."""
    model = _exact_model(split, split_site, dtypes)
    site = dataclasses.replace(split_site.site, name=_SITE)
    if assignment is None:
        assignment = Assignment(site, dense.METHOD, dense.DenseParameters())
    chosen = dataclasses.replace(assignment, site=site)
    variants = replace_sites(model, [chosen])
    built = (
        build_kernels(site_variants(chosen), targets=host_targets()[-1:])
        if kernels
        else KernelBuild()
    )
    lower_sites(model, variants, built.served, built.declined)
    counts = _block_counts(model)
    if counts is not None:
        model.graph.outputs.append(counts)
    read = {value for node in model.graph for value in node.inputs if value is not None}
    for value in list(model.graph.inputs):
        if value not in read:
            model.graph.inputs.remove(value)
    _name_values(model)
    library = built.libraries[-1].path if built.libraries else None
    inputs = tuple(str(value.name) for value in model.graph.inputs)
    outputs = tuple(str(value.name) for value in model.graph.outputs)
    content = ir.to_proto(model).SerializeToString(deterministic=True)
    return _SiteModel(content, inputs, outputs, library)


def _exact_model(
    split: SplitModel, split_site: SplitSite, dtypes: Mapping[str, np.dtype[np.generic]]
) -> ir.Model:
    """The raised node alone, its inputs named by role."""
    roles = {name: role for role, name in split_site.inputs.items()}
    node = onnx.NodeProto()
    node.CopyFrom(split_site.node)
    node.name = _SITE
    for place, name in enumerate(node.input):
        node.input[place] = roles.get(name, "")
    node.output[0] = "output"
    del node.output[1:]
    inputs = [
        onnx.helper.make_tensor_value_info(
            role, onnx.helper.np_dtype_to_tensor_dtype(dtypes[role]), None
        )
        for role in split_site.inputs
    ]
    output = onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([node], _SITE, inputs, [output])
    model = onnx.helper.make_model(graph, ir_version=IR_VERSION, functions=[split_site.function])
    model.opset_import.clear()
    model.opset_import.extend(split.opsets)
    return ir.from_proto(model)


def _name_values(model: ir.Model) -> None:
    """Names by place, so that equal attentions give equal models."""
    for index, node in enumerate(model.graph):
        node.name = f"node{index}"
        for slot, value in enumerate(node.outputs):
            value.name = f"value{index}_{slot}"


def _block_counts(model: ir.Model) -> ir.Value | None:
    """The lengths of lists of blocks that the attention reads, if it does."""
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        function = model.functions.get(node.op_identifier())
        if function is None:
            continue
        for value, parameter in zip(node.inputs, function.inputs, strict=False):
            if parameter.name == BLOCK_COUNTS and value is not None:
                return value
    return None
