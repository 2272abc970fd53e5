"""Inputs and outputs beyond those of attention reach the kernel as its specs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from subquad.kernels.host.build import build_kernels
from subquad.kernels.host.targets import X86_64_V3
from subquad.kernels.one_node import one_node_model
from wide_nodes import TEMPLATES, WeightedSumVariant

COUNTING = WeightedSumVariant(2, 3, block=4)
PLAIN = WeightedSumVariant(2, 3)


@pytest.fixture(scope="module")
def wide_library(cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_CACHE", str(cache))
        build = build_kernels([COUNTING, PLAIN], targets=[X86_64_V3], templates=TEMPLATES)
    assert not build.declined
    return build.libraries[0].path


def feeds_of(rng: np.random.Generator, kv_len: int) -> dict[str, NDArray[Any]]:
    shapes = {"query": (2, 2, 5, 3), "key": (2, 2, kv_len, 3), "value": (2, 2, kv_len, 3)}
    feeds: dict[str, NDArray[Any]] = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
    }
    return feeds | {"weights": rng.integers(-3, 4, kv_len, dtype=np.int32)}


def open_wide(variant: WeightedSumVariant, library: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    model = one_node_model(variant).SerializeToString()
    return onnxruntime.InferenceSession(model, options)


@pytest.mark.parametrize("variant", [COUNTING, PLAIN], ids=lambda variant: variant.overload)
@pytest.mark.parametrize("kv_len", [1, 4, 9])
def test_own_inputs_and_outputs(
    variant: WeightedSumVariant, kv_len: int, wide_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBQUAD_POISON", "1")
    feeds = feeds_of(np.random.default_rng(kv_len), kv_len)
    got = open_wide(variant, wide_library).run(None, feeds)
    wanted = variant.reference(**feeds)
    assert len(got) == len(wanted)
    # float32 sums of at most 9 terms.
    np.testing.assert_allclose(got[0], wanted[0], atol=1e-5)
    if variant.block:
        np.testing.assert_array_equal(got[1], wanted[1])


def test_own_input_is_checked(wide_library: Path) -> None:
    feeds = feeds_of(np.random.default_rng(0), 4)
    feeds["weights"] = feeds["weights"][:0]
    with pytest.raises(Exception, match="input weights is empty: axis 0 has size 0"):
        open_wide(PLAIN, wide_library).run(None, feeds)
