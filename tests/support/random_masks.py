"""Random graphs of mask operators over positions, tables and padding inputs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, numpy_helper

from onnx_graphs import BOOL, FLOAT, INT64, Graph

Dim = int | str


@dataclass(frozen=True)
class Tensor:
    name: str
    kind: str  # int, bool or float
    shape: tuple[Dim, ...]


class RandomGraph:
    """Grows a graph of mask operators over positions, tables and a padding input."""

    def __init__(self, rng: random.Random, table_size: int = 16) -> None:
        self.rng = rng
        self.g = Graph()
        mask = self.g.input("mask", INT64, ["B", "L"])
        flag = self.g.input("flag", BOOL, ["B", "L"])
        self.batch, self.length = self.g.dim(mask, 0), self.g.dim(mask, 1)
        arange = self.g.arange(self.length)
        table = np.arange(table_size) * rng.choice((1, 2, -1)) + rng.randint(-3, 3)
        sliced = self.g("Slice", table, [0], self._vector("L"), [0])
        tril = np.tril(np.ones((table_size, table_size), bool), rng.randint(-2, 2))
        ends = self.g("Concat", self._vector("L"), self._vector("L"), axis=0)
        outer = rng.random() < 0.5
        band = self.g("Slice", tril[None] if outer else tril, [0, 0], ends, [-2, -1])
        band_shape: tuple[Dim, ...] = (1, "L", "L") if outer else ("L", "L")
        self.tensors = [
            Tensor(mask, "int", ("B", "L")),
            Tensor(flag, "bool", ("B", "L")),
            Tensor(arange, "int", ("L",)),
            Tensor(sliced, "int", ("L",)),
            Tensor(self.g("Unsqueeze", arange, [1]), "int", ("L", 1)),
        ]
        self.tensors.append(Tensor(band, "bool", band_shape))

    def _vector(self, dim: Dim) -> str:
        if isinstance(dim, int):
            return self.g.const([dim], np.int64)
        return self.g("Unsqueeze", self.batch if dim == "B" else self.length, [0])

    def _shape(self, dims: tuple[Dim, ...]) -> str:
        return self.g("Concat", *(self._vector(d) for d in dims), axis=0)

    def pick(self, *kinds: str) -> Tensor | None:
        found = [t for t in self.tensors if t.kind in kinds]
        return self.rng.choice(found) if found else None

    def pair(self, *kinds: str) -> tuple[Tensor, Tensor] | None:
        """Two that broadcast."""
        for _ in range(8):
            a, b = self.pick(*kinds), self.pick(*kinds)
            if a and b and a.kind == b.kind and self.common(a, b) is not None:
                return a, b
        return None

    def common(self, *tensors: Tensor) -> tuple[Dim, ...] | None:
        rank = max(len(t.shape) for t in tensors)
        result: list[Dim] = [1] * rank
        for t in tensors:
            for axis, dim in enumerate(t.shape, start=rank - len(t.shape)):
                if dim != 1 and result[axis] not in (1, dim):
                    return None
                result[axis] = dim if dim != 1 else result[axis]
        return tuple(result)

    def add(self, name: str, kind: str, shape: tuple[Dim, ...]) -> None:
        if len(shape) <= 4:
            self.tensors.append(Tensor(name, kind, shape))

    def grow(self) -> None:
        step = self.rng.choice(
            ("arithmetic", "constant", "compare", "logic", "where", "unary", "cast", "move")
            + ("slice", "gather", "concat", "trilu", "expand", "reshape")
        )
        getattr(self, step)()

    def arithmetic(self) -> None:
        if pair := self.pair("int", "float"):
            shape = self.common(*pair)
            assert shape is not None
            op = self.rng.choice(("Add", "Sub", "Mul", "Min", "Max"))
            self.add(self.g(op, pair[0].name, pair[1].name), pair[0].kind, shape)

    def constant(self) -> None:
        if t := self.pick("int", "float"):
            number = self.rng.choice((-3, -1, 2, 3, 0))
            op = self.rng.choice(("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max"))
            if op in ("Div", "Mod") and (number == 0 or t.kind == "float"):
                op = "Add"
            value = self.g.const(number, np.int64 if t.kind == "int" else np.float32)
            self.add(self.g(op, t.name, value), t.kind, t.shape)

    def compare(self) -> None:
        if pair := self.pair("int", "float"):
            shape = self.common(*pair)
            assert shape is not None
            op = self.rng.choice(("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"))
            self.add(self.g(op, pair[0].name, pair[1].name), "bool", shape)

    def logic(self) -> None:
        if pair := self.pair("bool"):
            shape = self.common(*pair)
            assert shape is not None
            op = self.rng.choice(("And", "Or", "Xor"))
            self.add(self.g(op, pair[0].name, pair[1].name), "bool", shape)

    def where(self) -> None:
        condition, pair = self.pick("bool"), self.pair("int", "float")
        if condition and pair:
            shape = self.common(condition, *pair)
            if shape is not None:
                name = self.g("Where", condition.name, pair[0].name, pair[1].name)
                self.add(name, pair[0].kind, shape)

    def unary(self) -> None:
        t = self.pick("bool", "int", "float")
        if t is None:
            return
        ops = {"bool": ("Not",), "int": ("Neg", "Abs", "Sign"), "float": ("Neg", "Abs", "Floor")}
        self.add(self.g(self.rng.choice(ops[t.kind]), t.name), t.kind, t.shape)

    def cast(self) -> None:
        t = self.pick("bool", "int", "float")
        if t is None:
            return
        kind = self.rng.choice(("bool", "int", "float"))
        to = {"bool": BOOL, "int": INT64, "float": FLOAT}[kind]
        self.add(self.g("Cast", t.name, to=to), kind, t.shape)

    def move(self) -> None:
        t = self.pick("bool", "int", "float")
        if t is None:
            return
        if self.rng.random() < 0.5:
            axis = self.rng.randint(0, len(t.shape))
            shape = (*t.shape[:axis], 1, *t.shape[axis:])
            self.add(self.g("Unsqueeze", t.name, [axis]), t.kind, shape)
        elif len(t.shape) > 1:
            perm = list(range(len(t.shape)))
            self.rng.shuffle(perm)
            name = self.g("Transpose", t.name, perm=perm)
            self.add(name, t.kind, tuple(t.shape[p] for p in perm))
        if 1 in t.shape and len(t.shape) > 1:
            axis = t.shape.index(1)
            name = self.g("Squeeze", t.name, [axis])
            self.add(name, t.kind, (*t.shape[:axis], *t.shape[axis + 1 :]))

    def slice(self) -> None:
        """Bounds of every sign that keep or drop the whole axis, or cut a fixed one."""
        t = self.pick("bool", "int", "float")
        if t is None or "L" not in t.shape:
            return
        axis = t.shape.index("L")
        bounds = self.rng.choice((([0], [2**62]), ([-(2**62)], [2**62])))
        starts, ends = self.g.const(bounds[0], np.int64), self.g.const(bounds[1], np.int64)
        if self.rng.random() < 0.5:
            starts = self.g("Neg", self._vector("L"))
        elif self.rng.random() < 0.5:
            ends = self._vector("L")
        self.add(self.g("Slice", t.name, starts, ends, [axis]), t.kind, t.shape)

    def gather(self) -> None:
        t = self.pick("bool", "int", "float")
        if t is None or not t.shape or t.shape[-1] != "L":
            return
        arange = self.g.arange(self.length)
        choice = self.rng.choice(("gather", "last", "negative", "elements", "nd"))
        if choice == "gather":
            index = self.g("Unsqueeze", arange, [0])
            name = self.g("Gather", t.name, index, axis=-1)
            self.add(name, t.kind, (*t.shape[:-1], 1, "L"))
        elif choice == "last":
            name = self.g("Gather", t.name, self.g.const(-1, np.int64), axis=-1)
            self.add(name, t.kind, t.shape[:-1])
        elif choice == "negative":
            index = self.g("Sub", arange, self.length)
            self.add(self.g("Gather", t.name, index, axis=-1), t.kind, t.shape)
        elif choice == "elements":
            backwards = self.g("Sub", self.g("Sub", self.length, arange), self.g.const(1, np.int64))
            index = self.g("Expand", backwards, self.g("Shape", t.name))
            self.add(self.g("GatherElements", t.name, index, axis=-1), t.kind, t.shape)
        elif t.shape == ("B", "L"):
            rows = self.g("Unsqueeze", self.g.arange(self.batch), [1, 2])
            columns = self.g("Unsqueeze", arange, [0, 2])
            shape = self._shape(("B", "L", 1))
            index = self.g(
                "Concat", self.g("Expand", rows, shape), self.g("Expand", columns, shape), axis=-1
            )
            self.add(self.g("GatherND", t.name, index), t.kind, ("B", "L"))

    def concat(self) -> None:
        if pair := self.pair("bool", "int", "float"):
            a, b = pair
            if a.shape == b.shape and a.shape and a.shape[-1] == "L":
                name = self.g("Concat", a.name, b.name, axis=-1)
                half = self.g("Slice", name, self._vector("L"), [2**62], [-1])
                self.add(half, a.kind, a.shape)
                front = self.g("Slice", name, [0], self._vector("L"), [-1])
                self.add(front, a.kind, a.shape)

    def trilu(self) -> None:
        t = self.pick("bool", "int", "float")
        if t and len(t.shape) >= 2:
            offset = self.g.const(self.rng.randint(-3, 3), np.int64)
            name = self.g("Trilu", t.name, offset, upper=self.rng.randint(0, 1))
            self.add(name, t.kind, t.shape)

    def expand(self) -> None:
        t = self.pick("bool", "int", "float")
        if t is None or not t.shape:
            return
        dims: tuple[Dim, ...] = tuple(
            self.rng.choice(("B", "L", 3, 1)) if d == 1 else d for d in t.shape
        )
        if self.rng.random() < 0.5:
            self.add(self.g("Expand", t.name, self._shape(dims)), t.kind, dims)
        else:
            name = self.g(
                "ConstantOfShape", self._shape(dims), value=_tensor(self.rng.choice((0, 1, 7)))
            )
            self.add(name, "int", dims)

    def reshape(self) -> None:
        t = self.pick("bool", "int", "float")
        if t is None or not t.shape:
            return
        flat = self.g("Reshape", t.name, [-1])
        back = self.g("Reshape", flat, self._shape(t.shape))
        self.add(back, t.kind, t.shape)
        kept = self.g("Reshape", t.name, [0] * (len(t.shape) - 1) + [-1, 1])
        self.add(kept, t.kind, (*t.shape, 1))


def _tensor(number: int) -> TensorProto:
    return numpy_helper.from_array(np.array([number], np.int64))
