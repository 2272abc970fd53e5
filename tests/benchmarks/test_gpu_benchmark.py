"""The GPU benchmark where there is no GPU, and its workloads' references."""

from __future__ import annotations

import pytest

import gpu
from subquad.kernels.attention.cuda import TEMPLATE as ATTENTION
from subquad.kernels.hybrid.cuda import TEMPLATE as HYBRID
from subquad.runtime import gpu_kernels
from subquad.runtime.errors import TargetUnavailableError


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_kernels, "DRIVER", "libno-such-driver.so.1")
    assert gpu.main([]) == 6
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "nothing measured: CUDA kernels need an NVIDIA driver" in printed.err


def test_a_wrong_kernel_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(options: object) -> None:
        raise ArithmeticError("dense_causal: errors")

    monkeypatch.setattr(gpu, "run", wrong)
    assert gpu.main([]) == 3


@pytest.mark.parametrize("workload", gpu.WORKLOADS.values(), ids=gpu.WORKLOADS)
def test_every_workload_has_a_kernel_and_a_reference(workload: gpu.Workload) -> None:
    template = ATTENTION if workload.variant.op_type == "Attention" else HYBRID
    assert template.supports(workload.variant) is None
    feeds = workload.feeds(5)
    assert workload.variant.reference(**feeds).shape == feeds["query"].shape


def test_the_target_is_one_whose_code_the_gpu_runs() -> None:
    assert gpu.target_of((8, 6)).arch == "sm_80"
    assert gpu.target_of((9, 0)).arch == "sm_90"
    with pytest.raises(TargetUnavailableError, match="sm_100"):
        gpu.target_of((10, 0))
