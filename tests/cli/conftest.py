from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tiny_artifact
from subquad.cli import cli


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact causal artifact with a tokenizer; read only."""
    folder = tiny_artifact.build(tmp_path_factory.mktemp("tiny") / "decoder")
    tiny_artifact.add_tokenizer(folder)
    return folder


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run ``subquad`` in this process."""
    return lambda *arguments: CliRunner().invoke(cli, [str(item) for item in arguments])
