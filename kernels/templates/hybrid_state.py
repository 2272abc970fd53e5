"""What hybrid attention keeps of the tokens it has seen: window, sinks and sums of the linear part.

``HybridState`` makes it of the tokens of a prefill; ``steps.py`` carries it on.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from subquad.kernels.hybrid_decode.semantics import StateVariant
from subquad.kernels.templates.line_features import STEP_FEATURES
from subquad.kernels.templates.lines import Line, Row, local_line, split_task
from subquad.kernels.templates.products import Panel
from subquad.kernels.templates.rows import Buffers
from subquad.kernels.templates.vectors import Expr, bind, index, settle, store_scalar


def emit_state(buffers: Buffers, variant: StateVariant, panel: Panel) -> None:
    """``HybridState``: parallel over (batch, key/value head)."""
    batch, length = buffers.key.shape[0], buffers.key.shape[2]
    slots = variant.window_len
    with T.parallel(batch * variant.num_kv_heads) as task:
        row = Row(buffers, variant, panel, *split_task(task, variant))
        if slots:
            with T.serial(index(slots)) as slot:
                source = settle(length - slots + slot)
                with T.If(source >= 0):
                    with T.Then():
                        for name, part, dim in parts_of(variant):
                            row.copy(row.new(name, source), row.state(f"window_{part}", slot), dim)
                        if buffers.key_mask is not None:
                            real = T.cast(buffers.key_mask[row.batch, source], "float32")
                            row.write_once("window_mask", real, slot)
                    with T.Else():
                        for _, part, dim in parts_of(variant):
                            row.clear(row.state(f"window_{part}", slot), dim)
                        if variant.has_key_mask:
                            row.write_once("window_mask", T.float32(0.0), slot)
        if variant.sinks:
            sinks = Sinks(row)
            sinks.start(past=False)
            with T.serial(T.min(length, _sink_end(row, length))) as slot:
                sinks.take(slot)
        if variant.feature_dim:
            linear = LinearState(row)
            linear.start(past=False)
            with T.serial(T.max(length - slots, index(0))) as slot:
                with T.If(T.And(row.is_real(slot), row.position(slot) >= variant.sinks)):
                    with T.Then():
                        linear.fold(row.new("key", slot), row.new("value", slot))


def _sink_end(row: Row, length: Expr) -> Expr:
    """Slots from here on hold no sinks."""
    return settle(T.max(T.min(row.variant.sinks - row.position(index(0)), length), index(0)))


def parts_of(variant: StateVariant) -> tuple[tuple[str, str, int], tuple[str, str, int]]:
    """New tokens' name, name in the state, and dims, of keys and values."""
    return ("key", "keys", variant.head_dim), ("value", "values", variant.value_dim)


class Sinks:
    """The sinks of one head, in the outputs; ``real`` says which have arrived and count."""

    def __init__(self, row: Row) -> None:
        self.row, self.count = row, row.variant.sinks
        self.real = T.alloc_buffer((self.count,), "int32")

    def start(self, past: bool) -> None:
        row = self.row
        with T.serial(index(self.count)) as s:
            for _, part, dim in parts_of(row.variant):
                target = row.state(f"sink_{part}", s)
                if past:
                    row.copy(row.state(f"past_sink_{part}", s), target, dim)
                else:
                    row.clear(target, dim)
            mask: Expr = T.float32(0.0)
            if past and row.variant.has_key_mask:
                mask = bind(row.buffers.extra["past_sink_mask"][row.batch, s])
            elif past:
                mask = T.cast(s < row.position(index(0)), "float32")
            store_scalar(self.real, T.cast(mask > T.float32(0.0), "int32"), s)
            if row.variant.has_key_mask:
                row.write_once("sink_mask", mask, s)

    def take(self, slot: Expr) -> None:
        """A new token, if it is a sink."""
        row = self.row
        position = settle(row.position(slot))
        with T.If(T.And(position >= 0, position < self.count)):
            with T.Then():
                for name, part, dim in parts_of(row.variant):
                    row.copy(row.new(name, slot), row.state(f"sink_{part}", position), dim)
                real = bind(T.cast(row.is_real(slot), "int32"))
                store_scalar(self.real, real, position)
                if row.variant.has_key_mask:
                    row.write_once("sink_mask", T.cast(real, "float32"), position)


class LinearState:
    """The sums of one head, in the outputs ``linear_state`` and ``linear_normaliser``."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.features = row.variant.feature_dim
        self.value_dim = row.variant.value_dim
        self.map = STEP_FEATURES[row.variant.feature_map]
        self.line = local_line(self.features)
        self.projected = local_line(max(row.variant.map_dim, 1))

    def start(self, past: bool) -> None:
        row = self.row
        with T.serial(index(self.features)) as f:
            target = row.state("linear_state", f)
            if past:
                row.copy(row.state("past_linear_state", f), target, self.value_dim)
            else:
                row.clear(target, self.value_dim)
        normaliser = row.state("linear_normaliser")
        if past:
            row.copy(row.state("past_linear_normaliser"), normaliser, self.features)
        else:
            row.clear(normaliser, self.features)

    def _map(self, source: Line, weights: str, head: Expr) -> Line:
        row, dims = self.row, self.row.variant.map_dim
        u = source
        if dims:
            u = self.projected
            matrix = row.buffers.extra[weights]
            row.copy(Line(matrix, (head, index(row.variant.head_dim))), u, dims)
            row.add_products(
                u,
                dims,
                index(row.variant.head_dim),
                lambda d: (source.at(d), Line(matrix, (head, d))),
            )
        self.map(row, u, dims or row.variant.head_dim, self.line)
        return self.line

    def fold(self, key: Line, value: Line) -> None:
        """Add one token."""
        row = self.row
        features = self._map(key, "key_map", row.kv_head)
        with T.serial(index(self.features)) as f:
            row.add_multiple(features.at(f), value, row.state("linear_state", f), self.value_dim)
        one = T.float32(1.0)
        row.add_multiple(one, features, row.state("linear_normaliser"), self.features)

    def sums(self, query: Line, head: Expr, numerator: Line) -> Expr:
        """The numerator, and the denominator returned."""
        row = self.row
        features = self._map(query, "query_map", head)
        row.clear(numerator, self.value_dim)
        row.add_products(
            numerator,
            self.value_dim,
            index(self.features),
            lambda f: (features.at(f), row.state("linear_state", f)),
        )
        return row.dot(features, row.state("linear_normaliser"), self.features)
