"""The ONNX specification's own examples of its operators."""

from __future__ import annotations

from functools import cache
from typing import Any

from onnx.backend.test.case.node import collect_testcases


@cache
def _all_cases() -> tuple[Any, ...]:
    # onnx collects once per process, and only what was asked for then: so everything.
    return tuple(collect_testcases(""))


def cases_named(prefix: str) -> list[Any]:
    """Examples by the beginning of their name, expanded forms included."""
    return [case for case in _all_cases() if case.name.startswith(prefix)]


def specified_cases(op_type: str) -> list[Any]:
    """Examples whose model is one node of ``op_type``; ``model`` and ``data_sets`` of each."""
    return [
        case
        for case in _all_cases()
        if case.model is not None
        and len(case.model.graph.node) == 1
        and case.model.graph.node[0].op_type == op_type
    ]
