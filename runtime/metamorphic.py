"""What must not matter: tokens that an output may not see.

Three relations, each checked for bit-identical outputs. They need no reference values, so they
hold a converted model to the mask it claims, whatever its method approximates.

| relation | what changes | what must stay |
|---|---|---|
| ``padding`` | tokens under padding | outputs at real tokens |
| ``future`` (causal models) | tokens from slot ``t`` on | outputs at real tokens before ``t`` |
| ``batch`` | all rows but the first | outputs of the first row |

Where sites declare a causal granularity, ``future`` keeps what stands before the block of positions
that holds ``t``.

Of models with a cache, ``pieces`` is tested besides; see ``piecewise``.

A change that the reference shows as well is the source model's own doing (a pooler that reads a
padded slot, positions computed from token values) and is counted, not held against the artifact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.manifest import InputSpec, Manifest
from subquad.runtime.metrics import relative_change
from subquad.runtime.samples import Batch, Layout, random_ids

Values = Mapping[str, NDArray[Any]]
Runner = Callable[[Values], Values]
Relation = Literal["padding", "future", "batch", "pieces"]

# A model may exceed the reference's own change by this factor before it is called a leak.
_SLACK = 10.0


@dataclass(frozen=True)
class Change:
    """The same batch with other tokens at some slots.

    Attributes:
        relation: which relation it tests.
        feeds: the changed inputs.
        keep: for every length dimension ``[batch, length]``, true where outputs must stay; for a
            model without lengths the key is ``""`` and the mask ``[batch, 1]``.
        cut: first changed slot of ``future``.
        whole: whether outputs without a length axis must stay as well.
    """

    relation: Relation
    feeds: Values
    keep: Mapping[str, NDArray[np.bool_]]
    cut: int | None = None
    whole: bool = True


@dataclass(frozen=True)
class Violation:
    """An output that reacted to what it may not see.

    Attributes:
        relation, length, padding, cut: where it was seen.
        output: first output that changed.
        change: relative L2 norm of the change at the positions that must stay.
        site: first site that changed at such positions, ``""`` if not looked for or not found.
    """

    relation: Relation
    length: int
    padding: str
    cut: int | None
    output: str
    change: float
    site: str = ""


@dataclass
class MetamorphicResult:
    """Counts of comparisons and all violations.

    Attributes:
        checks: comparisons made, by relation.
        source_reacts: comparisons in which the reference changes as much, by relation.
        visible_reactions: comparisons of ``future`` and ``batch`` in which any output changed
            anywhere. With none, the model reads no tokens and the comparisons have no power.
        not_applicable: relation -> why it was not tested.
    """

    checks: dict[str, int] = field(default_factory=dict)
    source_reacts: dict[str, int] = field(default_factory=dict)
    visible_reactions: int = 0
    not_applicable: dict[str, str] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)


def changes(
    manifest: Manifest, layout: Layout, batch: Batch, *, causal: bool, seed: int
) -> Iterator[Change]:
    """All changes that must leave some outputs of ``batch`` alone."""
    rng = np.random.default_rng([seed, batch.length, 7])
    granularity = causal_granularity(manifest)
    real = real_tokens(layout, batch.feeds)
    padded = {dim: ~mask for dim, mask in real.items()}
    if any(mask.any() for mask in padded.values()):
        yield Change("padding", _replace(manifest, batch.feeds, padded, rng), real)
    if causal:
        for cut in _cuts(batch.length, granularity):
            future = {dim: _from_slot(mask.shape, cut) for dim, mask in real.items()}
            keep = {dim: mask & _before_block(mask, cut, granularity) for dim, mask in real.items()}
            if any(mask.any() for mask in keep.values()):
                feeds = _replace(manifest, batch.feeds, future, rng)
                yield Change("future", feeds, keep, cut=cut, whole=False)
    rows = next((mask.shape[0] for mask in real.values()), 0)
    if rows > 1 and layout.batch is not None:
        others = {dim: _other_rows(mask.shape) for dim, mask in real.items()}
        keep = {dim: mask & ~others[dim] for dim, mask in real.items()}
        yield Change("batch", _replace(manifest, batch.feeds, others, rng), keep)


def output_changes(
    manifest: Manifest, change: Change, before: Values, after: Values
) -> dict[str, float]:
    """How much each output moved where it must not; outputs that did not are left out."""
    moved = {}
    for spec in manifest.outputs:
        if spec.name not in before:
            continue
        found = length_axis(spec.shape, before[spec.name], change.keep)
        if found is not None:
            axis, mask = found
            pair = [select(values[spec.name], axis, mask) for values in (before, after)]
        elif change.relation == "batch":
            pair = [before[spec.name][:1], after[spec.name][:1]]
        elif change.whole:
            pair = [before[spec.name], after[spec.name]]
        else:
            continue
        amount = relative_change(pair[0], pair[1])
        if amount > 0.0:
            moved[spec.name] = amount
    return moved


def is_leak(model_change: float, reference_change: float) -> bool:
    """Whether the model reacts clearly more than the source model does."""
    return model_change > _SLACK * reference_change


def real_tokens(layout: Layout, feeds: Values) -> dict[str, NDArray[np.bool_]]:
    """For every length dimension with tokens, ``[batch, length]``: true = real token."""
    found: dict[str, NDArray[np.bool_]] = {}
    for dim in layout.lengths:
        if dim in layout.masks:
            found[dim] = np.asarray(feeds[layout.masks[dim]] != 0)
            continue
        shape = layout.token_shape(dim, feeds)
        if shape is not None:
            found[dim] = np.ones(shape, np.bool_)
    if not layout.lengths:
        rows = next(iter(feeds.values())).shape[0]
        found[""] = np.ones((rows, 1), np.bool_)
    return found


def length_axis(
    shape: tuple[int | str, ...], values: NDArray[Any], masks: Mapping[str, NDArray[np.bool_]]
) -> tuple[int, NDArray[np.bool_]] | None:
    """The axis of ``values`` that runs over tokens, and the mask of these tokens.

    Found by the name of the dimension; for a name the inputs do not use (exporters derive
    ``s0 + 1``), by its size if that is a length of exactly one kind.
    """
    for axis in range(1, values.ndim):
        mask = masks.get(str(shape[axis])) if axis < len(shape) else None
        if mask is not None and mask.shape == (values.shape[0], values.shape[axis]):
            return axis, mask
    for axis in range(1, values.ndim):
        if axis < len(shape) and isinstance(shape[axis], int):
            continue
        found = [m for m in masks.values() if m.shape == (values.shape[0], values.shape[axis])]
        if len(found) == 1:
            return axis, found[0]
    return None


def select(values: NDArray[Any], axis: int, mask: NDArray[np.bool_]) -> NDArray[Any]:
    """``[selected tokens, everything else]`` of an array ``[batch, ...]`` with a length axis.

    Without a copy where all tokens are selected, or one run of a single row: logits of a long row
    take more memory than everything else.
    """
    moved = np.moveaxis(values, axis, 1)
    if mask.size and mask.all():
        return moved.reshape(mask.size, -1)
    chosen = np.flatnonzero(mask[0]) if len(mask) == 1 else np.zeros(0, np.int64)
    if len(chosen) and chosen[-1] - chosen[0] + 1 == len(chosen):
        return moved[0, chosen[0] : chosen[-1] + 1].reshape(len(chosen), -1)
    picked = moved[mask]
    # Not -1: it cannot be told where no token is selected.
    return picked.reshape(len(picked), math.prod(picked.shape[1:]))


def causal_granularity(manifest: Manifest) -> int:
    """Blocks of positions between which the whole model is causal; 1 = it is exactly.

    The least common multiple: with blocks of 4 and of 6 in turn, a change reaches back from 6 to
    4, then to 0.
    """
    return math.lcm(*(record.causal_granularity for record in manifest.sites))


def _before_block(real: NDArray[np.bool_], cut: int, granularity: int) -> NDArray[np.bool_]:
    """Slots before the block of positions that slot ``cut`` is in; position 0 is the first real."""
    first = real.argmax(axis=1)[:, None]
    limit = first + (cut - first) // granularity * granularity
    return np.asarray(np.arange(real.shape[1])[None] < limit)


def _cuts(length: int, granularity: int) -> list[int]:
    # Odd ones: an output that leaks within a chunk shows nothing if the cut is a chunk boundary.
    cuts = {length // 3 | 1, length // 2 | 1, length - 1}
    if granularity > 1:
        # Here the most is promised of rows without padding in front.
        cuts.add((length - 1) // granularity * granularity)
    return sorted(cut for cut in cuts if 1 <= cut < length)


def _from_slot(shape: tuple[int, ...], cut: int) -> NDArray[np.bool_]:
    mask = np.zeros(shape, np.bool_)
    mask[:, cut:] = True
    return mask


def _other_rows(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    mask = np.zeros(shape, np.bool_)
    mask[1:] = True
    return mask


def _replace(
    manifest: Manifest,
    feeds: Values,
    where: Mapping[str, NDArray[np.bool_]],
    rng: np.random.Generator,
) -> dict[str, NDArray[Any]]:
    """``feeds`` with other tokens (and other values) at the slots ``where``, masks untouched."""
    changed = dict(feeds)
    for spec in manifest.inputs:
        if spec.role == "padding_mask" or "position" in spec.name:
            continue
        mask = _slots(spec, feeds[spec.name], where)
        if mask is None:
            continue
        values = feeds[spec.name].copy()
        values[mask] = _others(spec, values[mask], rng)
        changed[spec.name] = values
    return changed


def _slots(
    spec: InputSpec, values: NDArray[Any], where: Mapping[str, NDArray[np.bool_]]
) -> NDArray[np.bool_] | None:
    if "" in where:
        rows = where[""][:, 0]
        return rows if len(rows) == len(values) else None
    if len(spec.shape) < 2:
        return None
    mask = where.get(str(spec.shape[1]))
    return mask if mask is not None and mask.shape == values.shape[:2] else None


def _others(spec: InputSpec, old: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Valid values, each different from the old one where there is another."""
    if spec.role == "values":
        return rng.standard_normal(old.shape).astype(old.dtype)
    new = random_ids(spec, old.shape, rng)
    if spec.role == "ids" and spec.high is None:
        return old
    high = spec.high or int(new.max(initial=0)) + 2
    return np.where(new == old, (new + 1) % high, new).astype(old.dtype)
