"""One cache for all tests here: TVM takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from subquad.kernels.host.build import missing_tools
from subquad.kernels.host.targets import X86_64_V3
from subquad.kernels.tuning.local import LocalBench
from tunable_kernels import QUICK, QUICK_TEMPLATE, TEMPLATES
from tuning_cases import SMALL


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``SUBQUAD_CACHE`` is."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(cache))


@pytest.fixture(scope="session")
def bench(cache: Path) -> Iterator[tuple[LocalBench, list[str]]]:
    """Kernels of all modes, and why some were not built."""
    if missing_tools() is not None:
        pytest.skip(str(missing_tools()))
    made = LocalBench(*SMALL, X86_64_V3, TEMPLATES, compilers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_CACHE", str(cache))
        yield made, made.prepare([{"mode": mode} for mode in range(7)], 300.0)


@pytest.fixture(scope="session")
def quick(cache: Path) -> None:
    """The kernels of ``QUICK`` are in the cache."""
    if missing_tools() is not None:
        pytest.skip(str(missing_tools()))
    made = LocalBench(*SMALL, X86_64_V3, QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_CACHE", str(cache))
        assert not any(made.prepare([{"mode": mode} for mode in QUICK_TEMPLATE.modes], 300.0))
