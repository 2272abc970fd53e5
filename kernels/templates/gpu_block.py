"""What the threads of one GPU block do together: shared tiles, products of tiles, reductions.

A block is ``threads_x * threads_y`` threads. A tile of results is ``threads_y * rows`` rows by
``threads_x * columns`` columns: thread (x, y) owns rows ``y * rows ...`` (neighbours, so that they
are read from shared memory as vectors, and by all x at once) and columns ``x, x + threads_x ...``
(so that neighbouring threads read and write neighbouring numbers). Both operands of a product lie
in shared memory with the summed index first.

Every thread of the block must come to every ``sync``: nothing here may be called under a condition
that differs between threads, and TVM rejects a barrier inside a condition or a loop whose extent
depends on one. What a tile skips, it skips by the bounds of loops that are equal in all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.vectors import Expr, cells_in, store_scalar

VECTOR = 4
"""Floats per vector load from shared memory."""


def small(value: int) -> Expr:
    return T.int32(value)


def ceil_div(x: Expr, size: int) -> Expr:
    """``ceil(x / size)`` of a positive number, as one expression: the host sizes grids by it."""
    return T.truncdiv(x + (size - 1), T.int64(size))


def keep(value: Expr, dtype: str) -> Expr:
    """``vectors.settle`` for any scalar.

    TVM wants numbers from shared memory to be read in a store, not in a binding.
    """
    cell = T.alloc_buffer((1,), dtype, scope="local")
    store_scalar(cell, value, small(0))
    return T.Bind(cell[small(0)])


@contextmanager
def grid(blocks: Expr, threads: Threads) -> Iterator[Block]:
    """One kernel launch: ``blocks`` (int64, at least 1) blocks of ``threads``."""
    with cells_in("local"), T.launch_thread("blockIdx.x", T.cast(blocks, "int32")) as number:
        with T.launch_thread("threadIdx.x", small(threads.x)) as x:
            with T.launch_thread("threadIdx.y", small(threads.y)) as y:
                # TVM's merging of shared memory takes no load in a binding at the level of the
                # allocations; the attribute is one level more and means nothing else here.
                with T.attr(small(0), "extern_scope", small(0)):
                    yield Block(threads, number, x, y)


@dataclass(frozen=True)
class Threads:
    """Shape of a block.

    Attributes:
        scope: TVM's name of shared memory: ``shared.dyn`` (CUDA, whose static kind ends at 48 KiB)
            or ``shared`` (OpenCL, which has no other).
    """

    x: int
    y: int
    scope: str

    @property
    def count(self) -> int:
        return self.x * self.y


@dataclass(frozen=True)
class Block:
    """One thread's view of its block."""

    threads: Threads
    number: Expr
    x: Expr
    y: Expr

    @property
    def thread(self) -> Expr:
        """Number of this thread in its block."""
        return self.y * self.threads.x + self.x

    def shared(self, size: int, dtype: str = "float32") -> Expr:
        return T.alloc_buffer((small(size),), dtype, scope=self.threads.scope, align=16)

    def shared_tile(self, rows: int, columns: int) -> SharedTile:
        return SharedTile(self.shared(rows * columns), rows, columns)

    def sync(self) -> None:
        """Barrier, after which all see what any wrote to shared memory."""
        T.evaluate(T.tvm_storage_sync(self.threads.scope))

    @contextmanager
    def each(self, total: int) -> Iterator[Expr]:
        """Share ``0 .. total - 1`` among the threads; the body must not call ``sync``."""
        count = self.threads.count
        if total < count:
            with T.If(self.thread < total):
                with T.Then():
                    yield self.thread
            return
        with T.serial(small(-(-total // count))) as step:
            element = step * count + self.thread
            if total % count == 0:
                yield element
                return
            with T.If(element < total):
                with T.Then():
                    yield element


@dataclass(frozen=True)
class SharedTile:
    """A matrix in shared memory.

    Its buffer has one axis: TVM cuts unused ends of rows off a buffer with two, and with them the
    pitch that spreads the rows over the banks.
    """

    buffer: Expr
    rows: int
    pitch: int

    def __getitem__(self, at: tuple[Expr, Expr]) -> Expr:
        return self.buffer[at[0] * self.pitch + at[1]]

    def store(self, value: Expr, row: Expr, column: Expr) -> None:
        store_scalar(self.buffer, value, row * self.pitch + column)

    def vector(self, row: Expr, column: Expr, lanes: int) -> Expr:
        """``lanes`` numbers of a row from ``column`` on."""
        return self.buffer[_span(row * self.pitch + column, lanes)]


@dataclass(frozen=True)
class ThreadTile:
    """The results one thread owns: ``rows`` by ``columns``, in registers."""

    block: Block
    rows: int
    columns: int
    buffer: Expr

    @staticmethod
    def allocate(block: Block, rows: int, columns: int) -> ThreadTile:
        shape = (small(rows), small(columns))
        return ThreadTile(
            block, rows, columns, T.alloc_buffer(shape, "float32", scope="local", align=16)
        )

    def row(self, i: Expr) -> Expr:
        """Row of the block's tile that is row ``i`` here."""
        return self.block.y * self.rows + i

    def column(self, j: Expr) -> Expr:
        return j * self.block.threads.x + self.block.x

    @contextmanager
    def elements(self) -> Iterator[tuple[Expr, Expr]]:
        with T.unroll(small(self.rows)) as i:
            with T.unroll(small(self.columns)) as j:
                yield i, j

    def clear(self) -> None:
        with self.elements() as (i, j):
            store_scalar(self.buffer, T.float32(0.0), i, j)

    def update(self, change: Callable[[Expr, Expr, Expr], Expr]) -> None:
        """``tile[i, j] = change(tile[i, j], i, j)``."""
        with self.elements() as (i, j):
            store_scalar(self.buffer, change(self.buffer[i, j], i, j), i, j)

    @property
    def _lanes(self) -> int:
        """Rows that are read and written as one vector."""
        return VECTOR if self.rows % VECTOR == 0 else 1

    def store_transposed(self, target: SharedTile) -> None:
        """``target[column, row] = tile``."""
        lanes = self._lanes
        numbers = T.alloc_buffer((small(lanes),), "float32", scope="local", align=16)
        with T.unroll(small(self.columns)) as j:
            with T.unroll(small(self.rows // lanes)) as v:
                with T.unroll(small(lanes)) as lane:
                    store_scalar(numbers, self.buffer[v * lanes + lane, j], lane)
                start = self.column(j) * target.pitch + self.row(v * lanes)
                vector = numbers[_span(small(0), lanes)]
                T.buffer_store(target.buffer, vector, [_span(start, lanes)])

    def add_product(self, left: SharedTile, right: SharedTile, count: int, first: Expr = 0) -> None:
        """``tile[r, c] += sum_k left[first + k, r] * right[k, c]`` over ``count`` values of k."""
        left_values = T.alloc_buffer((small(self.rows),), "float32", scope="local", align=16)
        right_values = T.alloc_buffer((small(self.columns),), "float32", scope="local")
        lanes = self._lanes
        with T.serial(small(count)) as k:
            with T.unroll(small(self.rows // lanes)) as v:
                numbers = left.vector(first + k, self.row(v * lanes), lanes)
                T.buffer_store(left_values, numbers, [_span(v * lanes, lanes)])
            with T.unroll(small(self.columns)) as j:
                store_scalar(right_values, right[k, self.column(j)], j)
            self.update(lambda old, i, j: old + left_values[i] * right_values[j])


def _span(start: Expr, lanes: int) -> Expr:
    return T.Ramp(start, small(1), lanes) if lanes > 1 else start


DIM_GROUP = 8


def padded_dims(dims: int) -> int:
    """Rows that a tile needs for ``load_transposed``."""
    return -(-dims // DIM_GROUP) * DIM_GROUP


def load_transposed(
    block: Block, target: SharedTile, dims: int, count: int, element: Callable[[Expr, Expr], Expr]
) -> None:
    """``target[dim, row] = element(row, dim)``; what lies beyond ``dims`` is the last dim again.

    A warp takes 4 rows by 8 dims: whole sectors of global memory, and with a row pitch of
    ``target`` that is 4 more than a multiple of 32 no two threads in the same bank.

    Args:
        count: rows, a multiple of 4.
    """
    groups = padded_dims(dims) // DIM_GROUP
    with block.each(groups * DIM_GROUP * count) as number:
        dim = T.truncmod(number, DIM_GROUP) + T.truncmod(T.truncdiv(number, 32), groups) * DIM_GROUP
        row = T.truncmod(T.truncdiv(number, DIM_GROUP), 4) + T.truncdiv(number, 32 * groups) * 4
        # No condition around the store: PoCL 3.1 miscompiles two nested ones in a loop.
        source = dim if dims % DIM_GROUP == 0 else T.min(dim, small(dims - 1))
        target.store(element(row, source), dim, row)


def load_rows(
    block: Block, target: SharedTile, count: int, dims: int, element: Callable[[Expr, Expr], Expr]
) -> None:
    """``target[row, dim] = element(row, dim)``, neighbouring threads on neighbouring dims."""
    with block.each(count * dims) as number:
        row, dim = T.truncdiv(number, dims), T.truncmod(number, dims)
        target.store(element(row, dim), row, dim)
