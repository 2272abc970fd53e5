"""Artifacts made by hand, so that the runtime is tested without the converter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_artifact
from tiny_artifact import Tiny


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact causal artifact with a tokenizer; read only."""
    folder = tiny_artifact.build(tmp_path_factory.mktemp("tiny") / "decoder")
    tiny_artifact.add_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact bidirectional artifact with a tokenizer; read only."""
    folder = tiny_artifact.build(tmp_path_factory.mktemp("tiny") / "encoder", Tiny(causal=False))
    tiny_artifact.add_tokenizer(folder)
    return folder


@pytest.fixture
def copied(decoder: Path, tmp_path: Path) -> Path:
    """A copy of ``decoder`` to damage."""
    return Path(shutil.copytree(decoder, tmp_path / "copied"))


@pytest.fixture
def make(tmp_path: Path) -> Callable[[Tiny], Path]:
    """Build an artifact of its own."""
    return lambda tiny: tiny_artifact.build(tmp_path / "made", tiny)
