"""Which tensor of a product is the query, the key and the value of a linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from subquad.passes.recognise.products import Axis, Factor, Product, ProductReader

_MAX_TENSORS = 6


@dataclass(frozen=True)
class Roles:
    """What the tensors of a product are to an attention.

    Attributes:
        query, key, value: the tensors.
        masks: other tensors that multiply, over queries, keys or both.
        divisors: tensors that divide.
        batch, heads, queries, keys, features, dims: axes; of the first two also none.
    """

    query: Factor
    key: Factor
    value: Factor
    masks: tuple[Factor, ...]
    divisors: tuple[Factor, ...]
    batch: Axis
    heads: Axis
    queries: int
    keys: int
    features: int
    dims: int
    rank: int

    @property
    def scores(self) -> tuple[Axis, ...]:
        """The axes of the weights."""
        inner: tuple[Axis, ...] = ((self.queries,), (self.keys,))
        return (self.batch, self.heads, *inner) if self.rank == 4 else (self.batch, *inner)


def roles_of(product: Product, reader: ProductReader) -> Roles | None:
    """Which tensor is what; ``None``: the product is no attention."""
    result = [axis for axis in product.axes if axis]
    if len(product.axes) not in (3, 4) or any(len(axis) > 1 for axis in result):
        return None
    if len(product.summed) != 2:
        return None
    tensors = [f for f in product.factors if f.acts == "times" and len(f.labels) > 1]
    if not 3 <= len(tensors) <= _MAX_TENSORS:
        return None
    fitting = [
        roles
        for query, key, value in permutations(tensors, 3)
        if (roles := _fitting(product, query, key, value, reader)) is not None
    ]
    # A product of three matrices may be read from either end: rows of the result are queries.
    order = [axis[0] for axis in result]
    fitting.sort(key=lambda roles: order.index(roles.queries) > order.index(roles.dims))
    return fitting[0] if fitting else None


def _fitting(
    product: Product, query: Factor, key: Factor, value: Factor, reader: ProductReader
) -> Roles | None:
    summed, result = product.summed, product.result
    features = query.labels & key.labels & summed
    keys = key.labels & value.labels & summed
    queries = query.labels & result - key.labels - value.labels
    dims = value.labels & result - key.labels - query.labels
    if not len(features) == len(keys) == len(queries) == len(dims) == 1 or features == keys:
        return None
    ends = features | keys | queries | dims
    batch = (query.labels | key.labels | value.labels) - ends
    if not batch <= result or features & value.labels or keys & query.labels:
        return None
    if result - queries - dims - batch:
        return None
    (feature,), (of_keys,), (of_queries,), (dim,) = features, keys, queries, dims
    sizes = [reader.sizes[label] for label in (feature, dim)]
    length = reader.sizes[of_keys]
    if not all(size.is_constant for size in sizes):
        return None
    if length.is_constant and length.constant <= max(size.constant for size in sizes):
        return None  # fewer keys than features: the other order is the shorter one
    rest = [f for f in product.factors if f not in (query, key, value)]
    allowed = batch | keys | queries
    if any(not f.labels <= allowed for f in rest):
        return None
    outer = [axis for axis in product.axes if axis not in ((of_queries,), (dim,))]
    if len(outer) == 2 and outer[0] and reader.sizes[outer[0][0]].is_constant:
        # Batch rows may be any number, heads may not.
        if outer[1] and not reader.sizes[outer[1][0]].is_constant:
            outer.reverse()
    return Roles(
        query=query,
        key=key,
        value=value,
        masks=tuple(f for f in rest if f.acts != "divides"),
        divisors=tuple(f for f in rest if f.acts == "divides"),
        batch=outer[0] if outer else (),
        heads=outer[1] if len(outer) == 2 else (),
        queries=of_queries,
        keys=of_keys,
        features=feature,
        dims=dim,
        rank=len(product.axes),
    )
