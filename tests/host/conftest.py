"""One library of slow kernels for all tests here, built once: TVM takes seconds to import."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_nodes import (
    ABORTING,
    CAPPED,
    FAILING,
    NAMELESS,
    REFUSED,
    RIGHT,
    SKIPPING,
    TEMPLATES,
)
from subquad.kernels.host.build import KernelBuild, build_kernels
from subquad.kernels.host.targets import X86_64_V3


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``SUBQUAD_CACHE`` is, in all tests here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(cache))
    monkeypatch.delenv("SUBQUAD_POISON", raising=False)


@pytest.fixture(scope="session")
def built(cache: Path) -> Iterator[KernelBuild]:
    """Everything that can be built at all; what cannot is among it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_CACHE", str(cache))
        wrong = (REFUSED, NAMELESS, ABORTING, CAPPED)
        variants = (*wrong, *RIGHT, FAILING, SKIPPING)
        yield build_kernels(variants, targets=[X86_64_V3], templates=TEMPLATES)


@pytest.fixture(scope="session")
def library(built: KernelBuild) -> Path:
    assert len(built.libraries) == 1, built.declined
    return built.libraries[0].path
