"""Exact attention of few queries over many keys (decoding): tasks are parts of the keys.

Tasks of ``dense.py`` are blocks of query rows; with one query per head there may be fewer of them
than cores. Here each block's keys are cut into parts with an online softmax each, and the parts of
a row merge by their maxima and sums: attention over disjoint keys merges exactly.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.templates.dense import ExactSet, ExactSpans, live_panels
from subquad.kernels.templates.exact import ExactPanels, ExactTile, SharedPanels
from subquad.kernels.templates.products import Panel
from subquad.kernels.templates.rows import Buffers, HeadRows, KeyList
from subquad.kernels.templates.terms import Terms
from subquad.kernels.templates.vectors import Expr, blocks_of, index, quotient, remainder, settle

FEW_QUERIES = 16
"""Up to so many queries per head take this way."""

MIN_TASKS = 16
"""Keys are cut until there are so many tasks, enough for any cores to even out."""

MIN_KEYS = 256
"""Fewer keys per part are not worth a merge."""


def narrow_tile(tile: ExactTile, group: int) -> ExactTile:
    """Panels of one vector: few rows would leave the lanes of wider ones empty."""
    lanes = tile.panel.lanes
    panels = min(8, -(-FEW_QUERIES * group // lanes))
    # As many accumulators as the wide tile has.
    rows = tile.rows * tile.panel.vectors
    return replace(tile, panel=Panel(lanes, 1), panels=panels, rows=rows)


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
    """Parallel over (batch, key/value head, block of query rows, part of the keys), then merged.

    Args:
        tile: from ``narrow_tile``.
        exact_set: without sinks.
    """
    batch, query_len = buffers.query.shape[0], buffers.query.shape[2]
    blocks = blocks_of(query_len * heads.group, tile.queries)
    row_blocks = settle(batch * heads.num_kv_heads * blocks)
    wanted, useful = (
        blocks_of(index(MIN_TASKS), row_blocks),
        blocks_of(buffers.key.shape[2], MIN_KEYS),
    )
    parts = settle(T.min(wanted, useful))
    # At least row_blocks * parts, in terms of shapes alone: TVM moves allocations up.
    most_blocks = -(-FEW_QUERIES * heads.group // tile.queries)
    total = batch * (heads.num_kv_heads * most_blocks) + MIN_TASKS
    shared = SharedPanels.allocate(tile, heads.value_dim, total, entropy=terms.entropy)
    rows_of = query_len * heads.group
    with T.parallel(row_blocks * parts) as task:
        row_block, part = quotient(task, parts), remainder(task, parts)
        rows = HeadRows.of(buffers, heads, quotient(row_block, blocks))
        keys = KeyList.of(rows.batch, key_list)
        first_row = settle(remainder(row_block, blocks) * tile.queries)
        live = live_panels(tile, rows_of, first_row)
        exact = ExactPanels(tile, rows, scale, softcap, terms, live)
        spans = ExactSpans(tile, rows, keys, exact_set, *rows.alignment(), live)
        exact.start(first_row)
        if terms.sinks:
            with T.If(part > 0):
                with T.Then():
                    exact.leave_out_sinks()
        spans.find(first_row)
        spans.attend(exact, (part, parts))
        with T.If(parts == 1):
            with T.Then():
                exact.finish(first_row)
            with T.Else():
                exact.save(shared, task)
    # The sinks are in the parts.
    merge_terms = Terms(lse=terms.lse, entropy=terms.entropy)
    with T.If(parts > 1):
        with T.Then():
            with T.parallel(row_blocks) as row_block:
                rows = HeadRows.of(buffers, heads, quotient(row_block, blocks))
                first_row = settle(remainder(row_block, blocks) * tile.queries)
                live = live_panels(tile, rows_of, first_row)
                exact = ExactPanels(tile, rows, scale, softcap, merge_terms, live)
                exact.clear(first_row)
                with T.serial(parts) as part:
                    exact.merge(shared, settle(row_block * parts + part))
                exact.finish(first_row)
