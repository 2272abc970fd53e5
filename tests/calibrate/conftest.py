from __future__ import annotations

import pytest

import exact_folder
from exact_folder import ExactFolder


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> ExactFolder:
    """A decoder of three layers, raised; read only."""
    return exact_folder.build(tmp_path_factory.mktemp("exact") / "decoder")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> ExactFolder:
    """One of two layers; read only."""
    return exact_folder.build(tmp_path_factory.mktemp("exact") / "shallow", layers=2)
