"""The GPU benchmark where there is no GPU, and its workloads' references."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import gpu
from subquad.kernels.attention.cuda import TEMPLATE as ATTENTION
from subquad.kernels.gpu import SM_80, SM_90, GpuTarget
from subquad.kernels.host.gpu_build import GpuLibrary, missing_gpu_tools
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


def launch(registers: int, shared: int, threads: int = 256, spills: int = 0) -> dict[str, object]:
    return {
        "registers": registers,
        "spill_stores": spills,
        "spill_loads": spills,
        "static_shared_memory": 0,
        "dynamic_shared_memory": shared,
        "parameters": ["blockIdx.x", "threadIdx.x", "threadIdx.y", "tirx.use_dyn_shared_memory"],
        "values": ["batch * 12", str(threads // 16), "16", str(shared)],
    }


@pytest.mark.parametrize(
    ("target", "registers", "shared", "threads", "blocks"),
    [
        (SM_90, 32, 73_680, 256, 3),  # shared memory: 228 KiB by 72.95 KiB
        (SM_80, 32, 73_680, 256, 2),  # 164 KiB
        (SM_80, 77, 1_024, 256, 3),  # registers: 65536 by 256 * 80
        (SM_80, 80, 1_024, 256, 3),
        (SM_80, 81, 1_024, 256, 2),  # 256 * 88
        (SM_80, 16, 0, 256, 8),  # threads: 2048
    ],
)
def test_blocks_at_a_time(
    target: GpuTarget, registers: int, shared: int, threads: int, blocks: int
) -> None:
    kernels = {"list": launch(200, 0, 1024, spills=3), "main": launch(registers, shared, threads)}
    if not shared:
        del kernels["list"]
    usage = gpu.usage_of(GpuLibrary(Path(), "symbol", {"kernels": kernels}), target)
    spilled = 6 if shared else 0
    assert usage == gpu.Usage(registers, spilled, shared, blocks)


def test_compile_only_without_nvcc_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **kw: None if name == "nvcc" else which(name, **kw)
    )
    assert gpu.main(["--compile-only"]) == 6
    assert "nvcc was not found" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.skipif(missing_gpu_tools() is not None, reason=f"{missing_gpu_tools() or ''}")
def test_compile_only_prints_a_row_for_each_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--compile-only", "--workloads", "dense_padded"]) == 0
    head, _, *table = capsys.readouterr().out.splitlines()
    assert head.startswith("Largest launch of each kernel, nvcc 1")
    assert head.endswith("sm_90 / sm_80:")
    (row,) = table[2:]
    name, dim, registers, spilled, shared, blocks = row.strip("| ").split(" | ")
    assert (name, dim, spilled) == ("dense_padded", "32", "0 / 0")
    for cell in (registers, shared, blocks):
        assert len(cell.split(" / ")) == 2, row
