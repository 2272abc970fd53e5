"""CPU kernel of ``ai.subquad::HybridAttention``.

Heads without a linear part are the exact tile loop over window and sinks. With one, chunks of
queries run in order beside a state; see ``kernels/templates/linear.py`` and ``hybrid.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from subquad.kernels.hybrid.feature_maps import NONE
from subquad.kernels.hybrid.semantics import HeadPart, HybridVariant
from subquad.kernels.kernel import CpuTarget
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.parameters import (
    CPU_FEATURE_MAPS,
    HybridParameters,
    TileParameters,
)
from subquad.kernels.templates.space import Space
from subquad.runtime.errors import Rejection

if TYPE_CHECKING:
    from subquad.kernels.templates.dense import ExactSet
    from subquad.kernels.templates.hybrid import LinearPart
    from subquad.kernels.templates.linear import Side
    from subquad.kernels.templates.rows import Buffers, HeadSubset


@dataclass(frozen=True)
class HybridCpuTemplate:
    """See ``TunableTemplate``."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        if not isinstance(variant, HybridVariant):
            return Rejection(f"not hybrid attention: {variant.op_type}")
        if variant.feature_map == NONE:
            return None
        if variant.feature_map not in CPU_FEATURE_MAPS:
            known = ", ".join(CPU_FEATURE_MAPS)
            return Rejection(
                f"the CPU kernel has no feature map {variant.feature_map!r}; it has: {known}"
            )
        return None

    def space(self, variant: OperatorVariant, target: CpuTarget) -> Space:
        assert isinstance(variant, HybridVariant)
        names = set(HybridParameters.CHOICES)
        if variant.feature_map == NONE:
            names = set(TileParameters.CHOICES)
        else:
            # Panels follow from the chunk; without exact keys there are no blocks of them.
            names.discard("panels")
            if not variant.has_window and not variant.sinks:
                names.discard("keys")
        ordered = [name for name in HybridParameters.CHOICES if name in names]
        return HybridParameters.space(target, ordered)

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        from subquad.kernels.templates.function import attention_function

        assert isinstance(variant, HybridVariant)
        parameters = HybridParameters.defaults(target).override(params)

        def body(buffers: Buffers) -> None:
            for loop in _loops(variant):
                _emit(loop, variant, parameters, buffers)

        return attention_function(variant, body)


@dataclass(frozen=True)
class _Loop:
    """Heads that run in one parallel loop, because they have a linear part or have none.

    Attributes:
        parts: what each of the subset's parts does.
    """

    subset: HeadSubset
    parts: tuple[HeadPart, ...]

    @property
    def is_linear(self) -> bool:
        return bool(self.parts[0].linear)


def _loops(variant: HybridVariant) -> list[_Loop]:
    """Exact heads together, and linear heads that count the same keys.

    The loop over exact heads cuts the queries of each into many tasks, so that a few dense heads
    beside linear ones fill all threads.
    """
    members: dict[tuple[int, int], list[int]] = {}
    for head, part in enumerate(variant.parts):
        # A linear part counts all keys but the sinks.
        members.setdefault((part.linear, part.sinks if part.linear else 0), []).append(head)
    return [_loop(variant, heads) for _, heads in sorted(members.items())]


def _loop(variant: HybridVariant, chosen: list[int]) -> _Loop:
    """By whole key/value heads where their query heads do the same, else head by head."""
    from subquad.kernels.templates.rows import HeadSubset

    parts, group = variant.parts, variant.heads.group
    firsts = tuple(head for head in chosen if head % group == 0)
    whole = len(firsts) * group == len(chosen) and all(
        parts[head + i] == parts[head] and head + i in chosen
        for head in firsts
        for i in range(group)
    )
    if whole:
        subset = HeadSubset(firsts, tuple(head // group for head in firsts), group)
    else:
        subset = HeadSubset.singly(variant.heads, chosen)
    return _Loop(subset, tuple(parts[head] for head in subset.first_heads))


def _emit(
    loop: _Loop, variant: HybridVariant, parameters: HybridParameters, buffers: Buffers
) -> None:
    from subquad.kernels.templates.dense import emit_exact
    from subquad.kernels.templates.exact import exact_tile
    from subquad.kernels.templates.hybrid import emit_hybrid
    from subquad.kernels.templates.rows import list_keys

    heads, tile, scale = variant.heads, exact_tile(parameters), variant.scale
    sets = [_exact_set(variant, part) for part in loop.parts]
    if not loop.is_linear:
        emit_exact(buffers, list_keys(buffers), heads, tile, sets, scale, subset=loop.subset)
        return
    linear = _linear_part(variant, loop, parameters)
    exact = None
    if any(part.has_window or part.sinks for part in loop.parts):
        exact = replace(tile, panels=linear.tile.panels), sets
    emit_hybrid(buffers, heads, linear, exact, scale, loop.subset)


def _exact_set(variant: HybridVariant, part: HeadPart) -> ExactSet:
    from subquad.kernels.templates.dense import Band, ExactSet

    allowed = Band(variant.allowed_left, variant.allowed_right)
    window = Band(part.window_left, part.window_right) if part.has_window else None
    return ExactSet(allowed if part.is_dense else window, part.sinks, allowed)


def _linear_part(variant: HybridVariant, loop: _Loop, parameters: HybridParameters) -> LinearPart:
    from subquad.kernels.templates.feature_kernels import FEATURE_KERNELS
    from subquad.kernels.templates.hybrid import LinearPart
    from subquad.kernels.templates.linear import Features, LinearTile
    from subquad.kernels.templates.products import Panel, padded

    panel = Panel(parameters.lanes, parameters.vectors)
    tile = LinearTile(
        panel=panel,
        queries=padded(parameters.chunk, panel.width),
        group=loop.subset.group,
        rows=parameters.rows,
        state=Panel(parameters.lanes, parameters.state_vectors),
        state_rows=parameters.state_rows,
        unroll=parameters.unroll,
    )
    kernel = FEATURE_KERNELS[variant.feature_map]
    return LinearPart(
        tile=tile,
        features=Features(kernel, variant.map_dim, variant.feature_dim),
        sides=_sides(variant, loop.parts),
        skipped_sinks=loop.parts[0].sinks,
        min_tasks=parameters.min_tasks,
        shared=variant.mix == "shared",
        epsilon=variant.epsilon,
        least=variant.least,
        factor=variant.scale if variant.normaliser == "none" else None,
    )


def _sides(variant: HybridVariant, parts: tuple[HeadPart, ...]) -> tuple[Side, ...]:
    from subquad.kernels.templates.linear import Side

    # Without a window, window_left is -1: the past side counts the query's own token.
    past = Side("past", tuple(part.window_left + 1 for part in parts))
    if variant.is_causal:
        return (past,)
    if variant.has_decay or any(part.has_window for part in parts):
        return past, Side("future", tuple(max(part.window_right + 1, 1) for part in parts))
    return ()


TEMPLATE = HybridCpuTemplate()
