"""Feature maps of linear attention: as nodes of a graph, and in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnx_graphs import Graph

Step: TypeAlias = Callable[[Graph, str], str]


def identity(g: Graph, x: str) -> str:
    return x


def elu(g: Graph, x: str) -> str:
    return g("Add", g("Elu", x), 1.0)


def relu(g: Graph, x: str) -> str:
    return g("Relu", x)


def exp(g: Graph, x: str) -> str:
    return g("Exp", x)


MAPS: dict[Any, Callable[[NDArray[Any]], NDArray[Any]]] = {
    identity: lambda x: x,
    elu: lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    relu: lambda x: np.maximum(x, 0),
    exp: np.exp,
}
