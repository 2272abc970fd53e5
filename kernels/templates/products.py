"""The register tile all matrix products share: broadcast scalars times vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.vectors import Expr, bind, broadcast, constant, index, load, store


@dataclass(frozen=True)
class Panel:
    """A row of ``vectors`` vectors of ``lanes`` floats: the right side of a register tile."""

    lanes: int
    vectors: int

    @property
    def width(self) -> int:
        return self.lanes * self.vectors

    @property
    def square(self) -> int:
        """Rows and dims that are transposed at once."""
        return min(self.lanes, 8)

    def load(self, buffer: Expr, *outer: Expr, start: Expr = 0) -> list[Expr]:
        """``buffer[outer..., start:start + width]``, vector by vector."""
        return [
            bind(load(buffer, *outer, start + v * self.lanes, lanes=self.lanes))
            for v in range(self.vectors)
        ]

    def store(self, buffer: Expr, values: list[Expr], *outer: Expr, start: Expr = 0) -> None:
        for v, value in enumerate(values):
            store(buffer, value, *outer, start + v * self.lanes, lanes=self.lanes)

    def fill(self, value: float) -> list[Expr]:
        return [constant(value, self.lanes)] * self.vectors


@dataclass(frozen=True)
class RegisterTile:
    """``rows`` panels that live in registers; a local buffer that LLVM promotes."""

    panel: Panel
    rows: int
    buffer: Expr

    @staticmethod
    def allocate(panel: Panel, rows: int) -> RegisterTile:
        return RegisterTile(
            panel, rows, T.alloc_buffer((rows, panel.width), "float32", scope="local")
        )

    def get(self, row: int) -> list[Expr]:
        return self.panel.load(self.buffer, index(row))

    def set(self, row: int, values: list[Expr]) -> None:
        self.panel.store(self.buffer, values, index(row))

    def clear(self) -> None:
        for row in range(self.rows):
            self.set(row, self.panel.fill(0.0))

    def multiply_add(self, scalars: list[Expr], vectors: list[Expr]) -> None:
        """``tile[r] += scalars[r] * vectors``."""
        lanes = self.panel.lanes
        for row, scalar in enumerate(scalars):
            factor = bind(broadcast(scalar, lanes))
            self.set(row, [a + factor * b for a, b in zip(self.get(row), vectors, strict=True)])


@contextmanager
def unrolled(extent: Expr | int, factor: int) -> Iterator[list[Expr]]:
    """A serial loop whose body gets ``factor`` consecutive indices; extent a static multiple."""
    if isinstance(extent, int):
        while extent % factor:
            factor -= 1
    else:
        factor = 1
    with T.serial(index(extent // factor) if isinstance(extent, int) else extent) as step:
        yield [step * factor + offset if factor > 1 else step for offset in range(factor)]


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def row_groups(total: int, rows: int) -> list[tuple[int, int]]:
    """(number of groups of ``rows``, rows left over) as ``[(count, rows), (1, rest)]``."""
    groups = [(total // rows, rows)] if total >= rows else []
    return groups + ([(1, total % rows)] if total % rows else [])


def for_row_groups(total: int, rows: int, body: Callable[[Expr, int], None]) -> None:
    """Emit ``body(first row, number of rows)`` over ``total`` static rows."""
    done = 0
    for count, size in row_groups(total, rows):
        with T.serial(index(count)) as group:
            body(group * size + done, size)
        done += count * size


def cut(total: int, size: int) -> list[tuple[int, int]]:
    """``(first, count)`` of runs of at most ``size``."""
    return [(first, min(size, total - first)) for first in range(0, total, size)]
