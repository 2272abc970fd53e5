"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_kernels_by_default() -> Iterator[None]:
    """Conversions compile kernels where a test asks for them; a kernel takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_KERNELS", "none")
        yield
