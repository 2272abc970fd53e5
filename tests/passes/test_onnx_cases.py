"""ONNX's own test cases of the Attention operator: each is raised, or declined with a reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_cases import cases_named
from onnx_graphs import Runner
from subquad.passes.canonicalise import canonicalise
from subquad.passes.raise_attention import raise_attention


def outcome(case: Any) -> str:
    """``raised``, or the reason against; raised ones must give the expected outputs."""
    model = ir.from_proto(case.model)
    canonicalise(model)
    result = raise_attention(model)
    if not result.sites:
        assert result.rejections and all(r.reason for r in result.rejections), case.name
        return result.rejections[0].reason
    runner = Runner(model)
    names = [value.name or "" for value in model.graph.inputs]
    for inputs, expected in case.data_sets:
        got = runner(dict(zip(names, inputs, strict=True)))
        for ours, want in zip(got, expected, strict=True):
            # Rows that see no key: NaN in the standard's definition, zeros here.
            real = np.isfinite(want)
            np.testing.assert_allclose(ours[real], want[real], rtol=1e-4, atol=1e-5)
    return "raised"


def test_every_case_is_raised_or_declined() -> None:
    cases = cases_named("test_attention")
    assert len(cases) >= 186
    # Half of them are the operator, half its expansion into other operators.
    kinds = Counter(
        ("expansion" if "expanded" in case.name else "operator", outcome(case)) for case in cases
    )
    raised = {kind: kinds[kind, "raised"] for kind in ("operator", "expansion")}
    print(f"raised of {len(cases)}: {raised}")
    assert raised["operator"] >= 64 and raised["expansion"] >= 74, kinds
