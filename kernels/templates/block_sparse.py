"""Exact attention over listed blocks of keys: the tile loop of ``exact.py``, other keys.

A task is one block of queries of one query head, since every head has lists of its own.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.templates.dense import Band, ExactSet, ExactSpans
from subquad.kernels.templates.exact import ExactPanels, ExactTile
from subquad.kernels.templates.rows import Buffers, HeadRows, KeyList
from subquad.kernels.templates.vectors import (
    Expr,
    clamp,
    index,
    quotient,
    remainder,
    settle,
    store_scalar,
)


def emit_block_sparse(
    buffers: Buffers,
    key_list: tuple[Expr, Expr] | None,
    heads: Heads,
    tile: ExactTile,
    block: int,
    band: Band,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """The parallel loop over (batch, query head, query block).

    Args:
        key_list: from ``list_keys``; ``None`` without a key mask.
        tile: with panels for ``block`` queries.
    """
    counts, indices = buffers.extra["block_counts"], buffers.extra["block_indices"]
    batch, query_blocks = counts.shape[0], counts.shape[2]
    query_len = buffers.query.shape[2]
    with T.parallel(batch * heads.num_heads * query_blocks) as task:
        # Lists grow with the row on causal sites: first and last blocks in turn.
        order = remainder(task, query_blocks)
        half = quotient(order, 2)
        row = settle(T.if_then_else(half * 2 == order, half, query_blocks - 1 - half))
        rows = HeadRows.of_query_head(buffers, heads, quotient(task, query_blocks))
        keys = KeyList.of(rows.batch, key_list)
        assert buffers.query_positions is not None
        first_position = buffers.query_positions[rows.batch, index(0)]
        lead = settle(T.max(index(0) - first_position, index(0)))
        first_row = settle(lead + row * block)
        rows = replace(rows, query_end=settle(T.min(first_row + block, query_len)))
        with T.If(row == 0):
            with T.Then():
                _write_zeros(rows, settle(T.min(lead, query_len)))
        with T.If(first_row < query_len):
            with T.Then():
                alignment, first_slot = rows.alignment()
                exact = ExactPanels(tile, rows, scale, softcap)
                exact_set = ExactSet(window=band, sinks=0, allowed=band)
                spans = ExactSpans(tile, rows, keys, exact_set, alignment, first_slot)
                exact.start(first_row)
                spans.find(first_row)
                at = (rows.batch, rows.head_of(first_row), row)
                # Whatever a list says, nothing outside the buffers is read.
                length = settle(T.min(T.cast(counts[at], "int64"), indices.shape[3]))
                with T.serial(length) as entry:
                    number = T.cast(indices[(*at, entry)], "int64")
                    begin = settle(first_slot + number * block)
                    end = clamp(begin + block, index(0), rows.kv_len)
                    begin = clamp(begin, index(0), rows.kv_len)
                    spans.attend_range(exact, index(0), keys.rank(begin), keys.rank(end))
                exact.finish(first_row)


def _write_zeros(rows: HeadRows, end: Expr) -> None:
    """Queries ``0 .. end - 1`` are in no block."""
    with T.serial(end) as query:
        with T.serial(index(rows.value_dim)) as e:
            head = rows.head_of(query)
            store_scalar(rows.buffers.output, T.float32(0.0), rows.batch, head, query, e)
