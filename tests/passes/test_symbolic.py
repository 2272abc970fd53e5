"""The interpreter's terms, evaluated at every index, equal what ONNX Runtime computes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from onnx_graphs import Runner
from random_masks import RandomGraph
from subquad.passes.recognise.affine import OpaqueError, Symbol, position
from subquad.passes.recognise.expressions import Entry, atoms, evaluate
from subquad.passes.recognise.symbolic import Interpreter

SIZES = ({"B": 2, "L": 5}, {"B": 1, "L": 1}, {"B": 3, "L": 2}, {"B": 2, "L": 9})


def check_value(
    interpreter: Interpreter,
    value: ir.Value,
    actual: NDArray[Any],
    sizes: dict[str, int],
    feeds: dict[str, NDArray[Any]],
) -> bool:
    """Compare every element; False where the interpreter declines."""
    try:
        shape = interpreter.tensor(value).shape
        index = tuple(position(f"x{axis}", dim) for axis, dim in enumerate(shape))
        term = interpreter.element(value, index)
    except OpaqueError:
        return False
    known: dict[Symbol, int] = {Symbol(name): size for name, size in sizes.items()}
    if any(symbol not in known for dim in shape for symbol in dim.symbols):
        return False  # named by shape inference alone
    assert [int(dim.value(known)) for dim in shape] == list(actual.shape), value.name
    for number, at in enumerate(np.ndindex(actual.shape)):
        if number > 200:
            break
        here = dict(known)
        for affine, coordinate in zip(index, at, strict=True):
            here.update(dict.fromkeys(affine.symbols, coordinate))
        entries: dict[Any, Any] = {
            atom: feeds[atom.source][tuple(int(i.value(here)) for i in atom.index)].item()
            for atom in atoms(term)
            if isinstance(atom, Entry) and _inside(atom, here, feeds)
        }
        try:
            got = evaluate(term, entries, here)
        except OpaqueError:
            return False
        want = actual[at].item()
        assert got == want or (got != got and want != want), (value.name, at, sizes, got, want)
    return True


def _inside(atom: Entry, here: dict[Symbol, int], feeds: dict[str, NDArray[Any]]) -> bool:
    """Branches not taken may read beyond the input."""
    shape = feeds[atom.source].shape
    return all(0 <= i.value(here) < n for i, n in zip(atom.index, shape, strict=True))


def check_model(model: ir.Model, seed: int = 0) -> tuple[int, int]:
    """Every value at every size: (read, declined)."""
    names = [v.name for node in model.graph for v in node.outputs if v.name is not None]
    interpreter, read, declined = Interpreter(), 0, 0
    rng = np.random.default_rng(seed)
    runner = Runner(model, names)
    for sizes in SIZES:
        mask = rng.integers(0, 2, (sizes["B"], sizes["L"]))
        feeds = {"mask": mask, "flag": mask.astype(bool), "x": np.zeros((sizes["B"], sizes["L"]))}
        feeds["x"] = feeds["x"].astype(np.float32)
        results = runner(feeds)
        values = {v.name: v for node in model.graph for v in node.outputs}
        for name, actual in zip(names, results, strict=True):
            if check_value(interpreter, values[name], actual, sizes, feeds):
                read += 1
            else:
                declined += 1
    return read, declined


@settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(st.integers(0, 2**32))
def test_terms_equal_what_the_runtime_computes(seed: int) -> None:
    rng = random.Random(seed)
    graph = RandomGraph(rng)
    for _ in range(rng.randint(3, 14)):
        graph.grow()
    model = graph.g.model([graph.tensors[-1].name])
    try:
        read, _ = check_model(model, seed % 1000)
    except (ort_errors.InvalidArgument, ort_errors.RuntimeException, ort_errors.Fail):
        return  # an int64 overflow or a cast of infinity: no mask
    assert read
