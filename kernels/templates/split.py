"""Exact attention of few queries over many keys (decoding): tasks are parts of the keys.

Tasks of ``dense.py`` are blocks of query rows; with one query per head there may be fewer of them
than cores. Here each block's keys are cut into parts with an online softmax each, and the parts of
a row merge by their maxima and sums: attention over disjoint keys merges exactly.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.templates.dense import ExactSet, ExactSpans
from subquad.kernels.templates.exact import ExactTile
from subquad.kernels.templates.few_rows import FEW_ROWS, FewRows, SharedRows
from subquad.kernels.templates.products import Panel, padded
from subquad.kernels.templates.rows import Buffers, HeadRows, KeyList
from subquad.kernels.templates.terms import Terms
from subquad.kernels.templates.vectors import (
    Expr,
    blocks_of,
    index,
    quotient,
    remainder,
    settle,
)

MIN_TASKS = 16
"""Keys are cut until there are so many tasks, enough for any cores to even out."""

MIN_KEYS = 256
"""Fewer keys per part are not worth a merge."""

BLOCK = 128
"""Least number of keys per block: with few rows, nothing is kept in cache for the next one."""


def emit_split(
    buffers: Buffers,
    key_list: tuple[Expr, Expr] | None,
    heads: Heads,
    tile: ExactTile,
    exact_set: ExactSet,
    scale: float,
    softcap: float,
    terms: Terms,
) -> None:
    """Parallel over (batch, key/value head, part of the keys), then merged.

    Args:
        tile: of the exact loop; of it lanes and keys are used.
        exact_set: without sinks.
    """
    assert not exact_set.has_sinks
    lanes = tile.panel.lanes
    size = padded(max(BLOCK, tile.keys), lanes)
    spans_tile = replace(tile, panel=Panel(FEW_ROWS, 1), panels=1, keys=size)
    batch, row_count = buffers.query.shape[0], buffers.query.shape[2] * heads.group
    pairs = settle(batch * heads.num_kv_heads)
    wanted, useful = blocks_of(index(MIN_TASKS), pairs), blocks_of(buffers.key.shape[2], MIN_KEYS)
    parts = settle(T.min(wanted, useful))
    # At least pairs * parts, in terms of shapes alone: TVM moves allocations up.
    total = batch * heads.num_kv_heads + MIN_TASKS
    shared = SharedRows.allocate(heads.value_dim, total, entropy=terms.entropy)
    with T.parallel(pairs * parts) as task:
        part = remainder(task, parts)
        rows = HeadRows.of(buffers, heads, quotient(task, parts))
        keys = KeyList.of(rows.batch, key_list)
        exact = FewRows(lanes, size, rows, scale, softcap, terms, settle(row_count))
        spans = ExactSpans(spans_tile, rows, keys, exact_set, *rows.alignment())
        exact.start(part == 0)
        spans.find(index(0))
        spans.attend(exact, (part, parts))
        with T.If(parts == 1):
            with T.Then():
                exact.finish()
            with T.Else():
                exact.save(shared, task)
    with T.If(parts > 1):
        with T.Then():
            with T.parallel(pairs) as pair:
                rows = HeadRows.of(buffers, heads, pair)
                merged = FewRows(lanes, size, rows, scale, softcap, terms, settle(row_count))
                merged.clear()
                with T.serial(parts) as number:
                    merged.merge(shared, settle(pair * parts + number))
                merged.finish()
