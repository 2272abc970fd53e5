"""Tuning parameters of the CPU templates: names, defaults, limits. Free of TVM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

from subquad.kernels.kernel import CpuTarget
from subquad.kernels.templates.space import Params, Space

CPU_FEATURE_MAPS = ("elu", "hedgehog", "softmax_pair", "relu", "identity")
"""Feature maps that the linear template can compute; code in ``feature_kernels.py``."""


def _widest(target: CpuTarget) -> int:
    """Floats in a vector register of ``target``."""
    return 16 if "avx512f" in target.flags else 8


@dataclass(frozen=True)
class KernelParameters:
    """What the parameters of all templates have in common: limits, and a space to search.

    Attributes:
        lanes: floats per vector.
    """

    lanes: int = 8

    CHOICES: ClassVar[Mapping[str, tuple[int, ...]]] = {"lanes": (8, 16)}
    """What tuning tries."""

    STARTS: ClassVar[tuple[Mapping[str, int], ...]] = ()
    """What tuning tries first, as changes of the defaults."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or not 1 <= value <= 4096:
                raise ValueError(f"{field.name} must be an integer from 1 to 4096, got {value!r}")
        if self.lanes not in (4, 8, 16):
            raise ValueError(f"lanes must be 4, 8 or 16, got {self.lanes}")
        for rows, vectors in self._register_tiles():
            if rows * vectors > 64:
                raise ValueError(
                    f"a register tile of {rows} * {vectors} vectors is spilled; at most 64 fit"
                )

    @classmethod
    def defaults(cls, target: CpuTarget) -> Self:
        """Those of an untuned kernel on ``target``: as many lanes as its registers have.

        Half-empty registers halve the speed: dense causal attention of 4096 tokens takes 1.9 times
        as long with 8 lanes on AVX-512.
        """
        return cls(lanes=_widest(target))

    @classmethod
    def space(
        cls, target: CpuTarget, names: Iterable[str] | None = None, usual: Self | None = None
    ) -> Space:
        """What tuning searches on ``target``.

        Args:
            target: its registers bound the register tiles.
            names: parameters that matter to the kernel; the others keep their defaults.
            usual: the defaults; ``None``: those of the target.
        """
        names = tuple(cls.CHOICES if names is None else names)
        usual = cls.defaults(target) if usual is None else usual
        defaults = {name: getattr(usual, name) for name in names}
        return Space(
            {name: cls.CHOICES[name] for name in names},
            defaults,
            lambda params: cls._worth_trying(target, params),
            tuple({**defaults, **start} for start in cls.STARTS if start.keys() <= set(defaults)),
        )

    @classmethod
    def _worth_trying(cls, target: CpuTarget, params: Params) -> bool:
        """Valid, no more lanes than a register has, and a register tile that is not spilled."""
        try:
            sizes = cls.defaults(target).override(params)
        except ValueError:
            return False
        widest = _widest(target)
        registers = 32 if widest == 16 else 16
        if sizes.lanes > widest:
            return False
        # Accumulators and a row of operands; whether a scalar still fits is for timing to say.
        return all(
            rows * vectors + vectors <= registers for rows, vectors in sizes._register_tiles()
        )

    def _register_tiles(self) -> tuple[tuple[int, int], ...]:
        """Rows and vectors of each."""
        return ()

    def override(self, params: Mapping[str, int]) -> Self:
        """These parameters with some replaced.

        Raises:
            ValueError: unknown name or value out of range.
        """
        known = [field.name for field in fields(self)]
        for name in params:
            if name not in known:
                raise ValueError(f"unknown kernel parameter {name!r}; known: {', '.join(known)}")
        return replace(self, **params)


@dataclass(frozen=True)
class VectorParameters(KernelParameters):
    """Sizes of kernels whose products have one row: decode steps, block selection.

    Attributes:
        vectors: vectors that are summed side by side, in registers.
    """

    vectors: int = 8

    CHOICES: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "lanes": (8, 16),
        "vectors": (1, 2, 4, 8),
    }

    def _register_tiles(self) -> tuple[tuple[int, int], ...]:
        return ((1, self.vectors),)


@dataclass(frozen=True)
class TileParameters(KernelParameters):
    """Sizes of the exact tile loop; defaults measured on AVX2, and good on AVX-512 as well.

    Attributes:
        vectors: vectors per panel; a panel is ``lanes * vectors`` query rows wide.
        rows: broadcast scalars per register tile; ``rows * vectors`` accumulators, ``vectors``
            operands and one scalar should fit the registers.
        panels: panels per task; a block of keys is read from cache once for all of them.
        keys: keys per block; its keys, values and one panel should fit the first-level cache.
        unroll: inner-loop steps per iteration.
    """

    vectors: int = 2
    rows: int = 6
    panels: int = 8
    keys: int = 96
    unroll: int = 4

    CHOICES: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "lanes": (8, 16),
        "vectors": (1, 2, 3, 4),
        "rows": (2, 3, 4, 5, 6, 7, 8, 10, 12),
        "panels": (1, 2, 4, 6, 8, 12, 16),
        "keys": (32, 48, 64, 96, 128, 192, 256),
        "unroll": (1, 2, 4, 8),
    }
    # Large tiles for 32 registers; tall ones of one vector, wide ones of three; more keys per
    # block, fewer queries per task.
    STARTS: ClassVar[tuple[Mapping[str, int], ...]] = (
        {"rows": 8, "vectors": 3},
        {"rows": 6, "vectors": 4},
        {"rows": 12, "vectors": 1},
        {"rows": 4, "vectors": 3},
        {"rows": 8, "vectors": 2},
        {"keys": 64, "panels": 4},
        {"keys": 192},
        {"keys": 192, "panels": 4, "unroll": 2},
    )

    @classmethod
    def of_exact(cls, target: CpuTarget, head_dim: int, value_dim: int) -> Self:
        """Defaults of a kernel that is exact attention alone.

        Keys and values of a block fill a cache of 48 KiB: with twice as many keys, values at head
        dim 128 are read from the second level for every four rows of queries.
        """
        usual = cls.defaults(target)
        keys = _CACHED_FLOATS // (head_dim + value_dim)
        rows = 8 if usual.lanes == 16 else usual.rows
        # A multiple of any usual number of rows.
        return replace(usual, rows=rows, keys=min(usual.keys, max(24, keys // 24 * 24)))

    def _register_tiles(self) -> tuple[tuple[int, int], ...]:
        return ((self.rows, self.vectors),)


_CACHED_FLOATS = 12 * 1024


@dataclass(frozen=True)
class HybridParameters(TileParameters):
    """Sizes of the linear part; the panels of its chunks are shared with the exact part.

    Attributes:
        chunk: query slots per chunk, rounded up to whole panels of one head.
        state_vectors: vectors of value dims per register tile of the state update.
        state_rows: features per register tile of the state update.
        min_tasks: with fewer (batch, key/value head) pairs the sequence is cut into segments, at
            the price of computing most state updates twice.
    """

    chunk: int = 64
    state_vectors: int = 2
    state_rows: int = 6
    min_tasks: int = 8

    CHOICES: ClassVar[Mapping[str, tuple[int, ...]]] = {
        **TileParameters.CHOICES,
        "chunk": (16, 32, 48, 64, 96, 128),
        "state_vectors": (1, 2, 3, 4),
        "state_rows": (2, 3, 4, 5, 6, 7, 8, 10, 12),
        "min_tasks": (1, 2, 4, 8, 16),
    }

    def _register_tiles(self) -> tuple[tuple[int, int], ...]:
        return ((self.rows, self.vectors), (self.state_rows, self.state_vectors))
