"""Artifacts with a cache, converted once for all tests."""

from __future__ import annotations

from functools import cache

import pytest

import tiny_decoders
from subquad.converter.pipeline import convert
from tiny_decoders import Converted, Make


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """``converted("llama", "elu@1")``: the family, and what is forced on it."""

    @cache
    def make(family: str, *force: str) -> Converted:
        folder = tmp_path_factory.mktemp(family)
        model = tiny_decoders.save(getattr(tiny_decoders, family), folder / "source")
        convert(folder / "source", folder / "artifact", force=force, cache=True)
        return Converted(model, folder / "artifact")

    return make
