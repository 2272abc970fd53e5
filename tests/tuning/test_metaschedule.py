"""What MetaSchedule finds in our kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from subquad.kernels.host.targets import X86_64_V3
from subquad.kernels.kernel import CPU_TEMPLATES
from subquad.kernels.operators import OPERATORS
from subquad.kernels.tuning import metaschedule
from subquad.kernels.tuning.metaschedule import check_packages
from subquad.kernels.tuning.records import read_records
from subquad.kernels.tuning.tune import tune
from subquad.kernels.tuning.workload import parse_shape
from subquad.runtime.errors import UsageError

SHAPES = (
    "Attention:num_heads=2,head_dim=16,window_right=0,length=64",
    "HybridAttention:num_heads=2,head_dim=16,allowed_right=0,feature_map=elu,length=64",
)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaschedule, "NEEDS", ("no_such_package",))
    with pytest.raises(UsageError, match=r"no_such_package.*pip install 'subquad\[tune\]'"):
        check_packages()


@pytest.mark.slow
def test_scheduled_kernels_are_declined(tmp_path: Path) -> None:
    """If this fails because there are decisions now, the engine has become worth building."""
    pytest.importorskip("tvm", reason="apache-tvm is not installed")
    pytest.importorskip("xgboost", reason="subquad[tune] is not installed")
    shapes = [parse_shape(text, OPERATORS) for text in SHAPES]
    path = tmp_path / "r.jsonl"
    report = tune(
        shapes,
        path,
        target=X86_64_V3,
        threads=1,
        templates=CPU_TEMPLATES,
        engine="metaschedule",
    )
    for kernel in report.kernels:
        assert kernel.how == "default"
        assert kernel.reason == (
            "MetaSchedule has nothing to search: the kernel is scheduled already, "
            "0 instructions and 0 decisions"
        )
    assert read_records(path) == []
