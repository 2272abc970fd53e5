"""Tuning parameters of the GPU templates: names, defaults, limits. Free of TVM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

from subquad.kernels.inputs import Heads
from subquad.runtime.errors import Rejection

GPU_FEATURE_MAPS = ("elu",)
"""Feature maps that the linear template can compute; their code is in ``gpu_linear.py``."""

LARGEST_DIM = 256

REGISTER_TILE = 96
"""Floats of the register tiles that a thread holds at once: of its 255 registers the rest are
operands and addresses. More would be spilled."""


@dataclass(frozen=True)
class GpuParameters:
    """Sizes of the tiles; the defaults have not been timed on a GPU.

    Attributes:
        threads_x: threads along keys, then along value dims.
        threads_y: threads along query rows; a block of threads has ``threads_x * threads_y``.
        rows: query rows per thread; a multiple of 4 is read from shared memory as vectors.
        keys: keys per thread.
    """

    threads_x: int = 16
    threads_y: int = 16
    rows: int = 4
    keys: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or not 1 <= value <= 256:
                raise ValueError(f"{field.name} must be an integer from 1 to 256, got {value!r}")
        if self.block_threads > 1024 or self.block_threads % 32:
            raise ValueError(
                "threads_x * threads_y must be a multiple of 32 up to 1024, got "
                f"{self.threads_x} * {self.threads_y}"
            )
        if self.block_rows > self.block_threads or self.block_keys > self.block_threads:
            raise ValueError(f"a block needs a thread for each of its rows and keys, got {self}")
        if self.block_rows % 4 or self.block_keys % 4:
            raise ValueError(f"rows and keys of a block must be multiples of 4, got {self}")

    @property
    def block_threads(self) -> int:
        return self.threads_x * self.threads_y

    @property
    def block_rows(self) -> int:
        """Query rows per block."""
        return self.threads_y * self.rows

    @property
    def block_keys(self) -> int:
        """Keys per tile."""
        return self.threads_x * self.keys

    def check_registers(self, heads: Heads) -> None:
        """Raises ValueError: the register tiles would be spilled."""
        output = -(-heads.value_dim // self.threads_x)
        numbers = self.rows * (self.keys + output)
        if numbers > REGISTER_TILE:
            raise ValueError(
                f"a thread would hold {numbers} numbers of value_dim {heads.value_dim}, the limit "
                f"is {REGISTER_TILE}: {self}"
            )

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


def default_parameters(heads: Heads) -> GpuParameters:
    """Tiles whose shared memory and registers fit sm_80 for head dims up to ``LARGEST_DIM``."""
    return GpuParameters() if max(heads.head_dim, heads.value_dim) <= 128 else GpuParameters(keys=2)


def refuse_sizes(heads: Heads) -> Rejection | None:
    """Why no tile of such heads fits a block; ``None`` if one does."""
    largest = max(heads.head_dim, heads.value_dim)
    if largest > LARGEST_DIM:
        return Rejection(
            f"the GPU kernel holds a tile of heads in shared memory and registers: head_dim and "
            f"value_dim may be at most {LARGEST_DIM}, got {largest}"
        )
    return None
