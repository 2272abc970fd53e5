"""GPU kernels on a CPU; see ``tests/support/opencl_kernels.py``.

No test here is skipped where PoCL is missing: ``make test-gpu-schedules`` then fails and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from opencl_kernels import OpenClKernel
from oracles import Case

RunKernel = Callable[..., NDArray[np.float32]]


@cache
def _kernel(variant: Any, params: tuple[tuple[str, int], ...]) -> OpenClKernel:
    return OpenClKernel(variant, dict(params))


@pytest.fixture(scope="session")
def run_kernel() -> RunKernel:
    """``run_kernel(variant, case, params={})``: the output, full of NaN before."""

    def run(
        variant: Any, case: Case, params: Mapping[str, int] | None = None
    ) -> NDArray[np.float32]:
        kernel = _kernel(variant, tuple(sorted((params or {}).items())))
        output: NDArray[np.float32] = kernel(case.feeds(variant))[0]
        return output

    return run
