"""``ai.subquad::HybridState`` and ``HybridDecode``: causal hybrid attention with bounded state.

``HybridDecode`` attends from new tokens to everything before them as ``HybridAttention`` does, from
a state whose size does not depend on how much that was; ``HybridState`` makes the state that a
prefill leaves behind. ``HybridAttention`` over all tokens, and ``HybridAttention`` over the first,
``HybridState`` of them and ``HybridDecode`` for the others, in pieces of any sizes, are the same
numbers but for rounding.

The state, ``L = window_left``, ``S = sinks``, ``F`` features; a variant has the parts it needs:

| name | shape, float32 | |
|---|---|---|
| window_keys, window_values | ``[batch, num_kv_heads, L, dim]`` | the last L slots, oldest first |
| window_mask | ``[batch, L]`` | 1 where real, else 0; with a key mask only |
| sink_keys, sink_values | ``[batch, num_kv_heads, S, dim]`` | by position |
| sink_mask | ``[batch, S]`` | 1 where real, else 0; with a key mask only |
| linear_state | ``[batch, num_kv_heads, F, value_dim]`` | sum of phi(k) v, see below |
| linear_normaliser | ``[batch, num_kv_heads, F]`` | sum of phi(k) |

The sums are over all real tokens before the window that are no sinks.

Before any token the state is zeros. ``HybridDecode`` takes each part as ``past_<name>`` and returns
it as ``<name>``; nothing is updated in place. The window is kept in order, not as a ring: a node
must write a whole new state anyway, and an order needs no index.

Positions are real-token positions as everywhere: tokens of left padding have negative ones, and
with holes in the mask positions go on counting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.body import Body
from subquad.kernels.hybrid.feature_maps import NONE
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.hybrid_decode.bodies import decode_body, state_body
from subquad.kernels.hybrid_decode.reference import decode_steps, state_of
from subquad.kernels.inputs import Heads, limit_label, number_label, output_spec
from subquad.kernels.operator import UNLIMITED, TensorSpec, node_attributes
from subquad.runtime.errors import Rejection

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class StateVariant:
    """What state a causal hybrid attention carries, with all static choices fixed.

    Attributes: as of ``HybridVariant``, whose band is causal (``allowed_right = 0``).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window_left: int = UNLIMITED
    sinks: int = 0
    allowed_left: int = UNLIMITED
    feature_map: str = NONE
    has_key_mask: bool = False
    map_dim: int = 0

    def __post_init__(self) -> None:
        _ = self.prefill

    @property
    def prefill(self) -> HybridVariant:
        """The attention over all tokens at once; checks the choices."""
        return HybridVariant(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.value_dim,
            self.scale,
            window_left=self.window_left,
            window_right=UNLIMITED if self.window_left == UNLIMITED else 0,
            sinks=self.sinks,
            allowed_left=self.allowed_left,
            allowed_right=0,
            feature_map=self.feature_map,
            has_key_mask=self.has_key_mask,
            map_dim=self.map_dim,
        )

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)

    @property
    def window_len(self) -> int:
        """Slots of the window state."""
        return max(self.window_left, 0)

    @property
    def feature_dim(self) -> int:
        """0 without a linear part."""
        return self.prefill.feature_dim

    @property
    def state(self) -> tuple[TensorSpec, ...]:
        """The parts of the state, in order."""
        heads, slots, sinks, features = (
            self.num_kv_heads,
            self.window_len,
            self.sinks,
            self.feature_dim,
        )
        specs = []
        for name, length in (("window", slots), ("sink", sinks)):
            if not length:
                continue
            for part, dim in (("keys", self.head_dim), ("values", self.value_dim)):
                dims = ("batch", heads, length, dim)
                specs.append(TensorSpec(f"{name}_{part}", "float32", dims))
            if self.has_key_mask:
                specs.append(TensorSpec(f"{name}_mask", "float32", ("batch", length)))
        if features:
            dims = ("batch", heads, features, self.value_dim)
            specs.append(TensorSpec("linear_state", "float32", dims))
            specs.append(TensorSpec("linear_normaliser", "float32", dims[:3]))
        return tuple(specs)

    @property
    def op_type(self) -> str:
        raise NotImplementedError

    @property
    def overload(self) -> str:
        # Kernels are named by it: those of the two operators must differ.
        kind = self.op_type.removeprefix("Hybrid").lower()
        parts = [kind, self.heads.label, f"s{number_label(self.scale)}"]
        if self.window_left != UNLIMITED:
            parts.append(f"w{self.window_left}")
        if self.sinks:
            parts.append(f"sinks{self.sinks}")
        parts.append(f"l{limit_label(self.allowed_left)}")
        parts.append(self.feature_map + (str(self.map_dim) if self.map_dim else ""))
        if self.has_key_mask:
            parts.append("mask")
        return "_".join(parts)

    def attributes(self) -> Mapping[str, ir.Attr]:
        return node_attributes(
            self,
            "num_heads",
            "num_kv_heads",
            "scale",
            "window_left",
            "sinks",
            "allowed_left",
            "feature_map",
        )

    def _tokens(self, length: str, positions: str) -> dict[str, TensorSpec]:
        """Key, value, mask and positions of the tokens of one call."""
        mask = TensorSpec("key_mask", "bool", ("batch", length))
        kv_heads = ("batch", self.num_kv_heads, length)
        specs = {
            "key": TensorSpec("key", "float32", (*kv_heads, self.head_dim)),
            "value": TensorSpec("value", "float32", (*kv_heads, self.value_dim)),
            "positions": TensorSpec(positions, "int64", ("batch", length)),
        }
        return specs | ({"key_mask": mask} if self.has_key_mask else {})

    def _map(self, name: str, heads: int) -> TensorSpec | None:
        """Weights of the feature map, as of ``HybridAttention``."""
        dims = (heads, self.head_dim + 1, self.map_dim)
        return TensorSpec(name, "float32", dims) if self.map_dim else None

    def _formal_inputs(
        self, specs: Sequence[TensorSpec | None]
    ) -> tuple[list[ir.Value], dict[str, ir.Value]]:
        """Inputs of a function; and by name, positions under one name in both operators."""
        formal = [
            ir.Value(name=spec.name if spec else f"absent_{place}")
            for place, spec in enumerate(specs)
        ]
        return formal, _with_positions({str(value.name): value for value in formal})


@dataclass(frozen=True)
class HybridStateVariant(StateVariant):
    """The state after a first piece of a sequence.

    Inputs: key, value, key_mask, key_positions and key_map as of ``HybridAttention``.
    """

    @property
    def op_type(self) -> str:
        return "HybridState"

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        new = self._tokens("kv_len", "key_positions")
        key_map = self._map("key_map", self.num_kv_heads)
        specs = (new["key"], new["value"], new.get("key_mask"), new["positions"], key_map)
        return specs if key_map is not None else specs[:-1]

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.state

    def build_function(self) -> ir.Function:
        body = Body()
        formal, given = self._formal_inputs(self.inputs)
        state = state_body(body, self, given)
        outputs = [state[spec.name] for spec in self.state]
        return body.function(self.op_type, self.overload, formal, outputs, self.attributes())

    def reference(self, **inputs: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        state = state_of(self, _with_positions(inputs))
        return tuple(state[spec.name] for spec in self.state)


@dataclass(frozen=True)
class HybridDecodeVariant(StateVariant):
    """The next tokens, one or many.

    Inputs: query, key, value, key_mask and query_positions of the new tokens, query_map and
    key_map as of ``HybridAttention``, then the state.
    Outputs: the attention, then the state after these tokens.
    """

    @property
    def op_type(self) -> str:
        return "HybridDecode"

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        new = self._tokens("query_len", "query_positions")
        dims = ("batch", self.num_heads, "query_len", self.head_dim)
        query = TensorSpec("query", "float32", dims)
        past = {spec.name: _past(spec) for spec in self.state}
        # A place for each part of the state in every variant: the host's operator has one list.
        state = [past.get(name) for name in STATE_NAMES]
        tokens = [query, new["key"], new["value"], new.get("key_mask"), new["positions"]]
        maps = [
            self._map("query_map", self.num_heads),
            self._map("key_map", self.num_kv_heads),
        ]
        specs = [*tokens, *maps, *state]
        while specs[-1] is None:
            specs.pop()
        return tuple(specs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (output_spec(self.heads), *self.state)

    def build_function(self) -> ir.Function:
        body = Body()
        formal, given = self._formal_inputs(self.inputs)
        output, state = decode_body(body, self, given)
        outputs = [output, *(state[spec.name] for spec in self.state)]
        return body.function(self.op_type, self.overload, formal, outputs, self.attributes())

    def reference(self, **inputs: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        output, state = decode_steps(self, _with_positions(inputs))
        return (output, *(state[spec.name] for spec in self.state))


STATE_NAMES = (
    "window_keys",
    "window_values",
    "window_mask",
    "sink_keys",
    "sink_values",
    "sink_mask",
    "linear_state",
    "linear_normaliser",
)


T = TypeVar("T")


def _with_positions(inputs: Mapping[str, T]) -> dict[str, T]:
    """Inputs by name; the positions are also called ``positions``."""
    name = "query_positions" if "query_positions" in inputs else "key_positions"
    return {**inputs, "positions": inputs[name]}


def _past(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(f"past_{spec.name}", spec.dtype, spec.dims)


def empty_state(variant: StateVariant, batch: int) -> Arrays:
    """The state before any token, by the names of ``HybridDecode``'s inputs."""
    sizes = {"batch": batch}
    return {
        f"past_{spec.name}": np.zeros([sizes.get(d, d) for d in spec.dims], dtype=spec.dtype)  # type: ignore[arg-type]
        for spec in variant.state
    }


def decoding_of(
    variant: HybridVariant,
) -> tuple[HybridStateVariant, HybridDecodeVariant] | Rejection:
    """The operators that continue a prefill of this variant, if it has a bounded state."""
    if not variant.is_causal:
        return Rejection("attention that is not causal has no decode step")
    if variant.has_window and variant.window_right != 0:
        return Rejection("a window that looks ahead has no decode step")
    known = {field.name for field in fields(StateVariant)} | {
        "window_right",
        "allowed_right",
        "mix",
    }
    for field in fields(variant):
        if field.name not in known and getattr(variant, field.name) != field.default:
            return Rejection(f"the decode step knows no {field.name}")
    if variant.mix != "lse":
        return Rejection(f"the decode step knows no mix {variant.mix!r}")
    if variant.map is not None and variant.map.is_signed:
        return Rejection("the decode step knows no features that may be negative")
    names = [field.name for field in fields(StateVariant)]
    choices = {name: getattr(variant, name) for name in names}
    return HybridStateVariant(**choices), HybridDecodeVariant(**choices)
