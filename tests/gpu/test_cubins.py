"""CUDA kernels compiled without a GPU: what the compiler says of them, and what becomes of them."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import subquad
from kernel_nodes import TINY
from subquad.cli import cli
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.gpu import CUDA_TARGETS, SM_80, SM_90, GpuTarget
from subquad.kernels.host.gpu_build import (
    GpuBuild,
    build_gpu_kernels,
    missing_gpu_tools,
    parse_target,
)
from subquad.kernels.host.gpu_child import Launch, blocks_in_vain, bound_launches, parse_usage
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.gpu_parameters import GpuParameters, refuse_sizes
from subquad.runtime import gpu_kernels
from subquad.runtime.errors import TargetUnavailableError, UsageError
from subquad.runtime.gpu_kernels import CUDA_ARCHS, gpu_targets, load_gpu_kernels
from subquad.runtime.manifest import Manifest
from tiny_onnx import save_tiny_decoder

DENSE = AttentionVariant(12, 12, 64, 64, 0.125, window_right=0, has_key_mask=True)
HYBRID = HybridVariant(12, 12, 64, 64, 0.125, 63, 0, 4, allowed_right=0, feature_map="elu")
BIASED = AttentionVariant(2, 2, 64, 64, 0.125, has_key_bias=True, has_lse=True)
TOO_WIDE = AttentionVariant(2, 2, 320, 64, 0.125)

REGISTERS = 65536
"""Of a multiprocessor of every GPU since Kepler."""
_EM_CUDA = 190

needs_nvcc = pytest.mark.skipif(
    missing_gpu_tools() is not None, reason=f"{missing_gpu_tools() or ''}"
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def built() -> GpuBuild:
    # Of all files here at once: TVM takes seconds to import. TINY is that of the tiny decoder.
    return build_gpu_kernels([DENSE, HYBRID, TINY, BIASED, TOO_WIDE], SM_90)


def check_resources(build: GpuBuild) -> None:
    """No spills, and two blocks at a time on a multiprocessor."""
    target = build.target
    assert build.libraries
    for library in build.libraries:
        for name, kernel in library.description["kernels"].items():
            assert kernel["spill_stores"] == kernel["spill_loads"] == 0, name
            threads = 1
            for tag, value in zip(kernel["parameters"], kernel["values"], strict=True):
                threads *= int(value) if tag.startswith("threadIdx") else 1
            # While one block waits for memory or at a barrier, another computes.
            assert 2 * threads * kernel["registers"] <= REGISTERS, name
            shared = kernel["dynamic_shared_memory"] + kernel["static_shared_memory"]
            # 1 KiB per block is the system's, as in the limit of one block.
            assert 2 * (shared + 1024) <= target.shared_memory + 1024, name


@pytest.mark.nvcc
@needs_nvcc
def test_registers_spills_and_shared_memory(built: GpuBuild) -> None:
    check_resources(built)
    counts = {item.description["overload"]: item.description["kernels"] for item in built.libraries}
    # Key list and attention; keys without sinks, then three passes; the tiny one has a mask.
    assert {key: len(kernels) for key, kernels in counts.items()} == {
        DENSE.overload: 2,
        HYBRID.overload: 4,
        TINY.overload: 2,
    }


@pytest.mark.nvcc
@needs_nvcc
def test_registers_spills_and_shared_memory_of_an_older_gpu() -> None:
    """Registers are as many as on sm_90, shared memory is a third less."""
    older = build_gpu_kernels([DENSE, HYBRID], SM_80)
    check_resources(older)
    counts = {item.description["overload"]: item.description["kernels"] for item in older.libraries}
    assert {key: len(kernels) for key, kernels in counts.items()} == {
        DENSE.overload: 2,
        HYBRID.overload: 4,
    }


@pytest.mark.nvcc
@needs_nvcc
def test_what_has_no_kernel_says_why(built: GpuBuild) -> None:
    reasons = {key[1]: refusal.reason for key, refusal in built.declined.items()}
    assert reasons == {
        BIASED.overload: "the GPU kernel has no key bias, row outputs",
        TOO_WIDE.overload: "the GPU kernel holds a tile of heads in shared memory and registers: "
        "head_dim and value_dim may be at most 256, got 320",
    }


@pytest.mark.nvcc
@needs_nvcc
def test_library_holds_a_cubin(built: GpuBuild) -> None:
    content = built.libraries[0].path.read_bytes()
    start = content.find(b"\x7fELF", 4)
    assert start > 0
    (machine,) = struct.unpack_from("<H", content, start + 18)
    assert machine == _EM_CUDA
    assert b"__global__" not in content, "the source was packed, for the receiver to compile"


@pytest.mark.slow
@pytest.mark.nvcc
@needs_nvcc
def test_equal_inputs_give_equal_bytes(
    built: GpuBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library,) = [item for item in built.libraries if DENSE.overload in item.symbol]
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    (again,) = build_gpu_kernels([DENSE], SM_90).libraries
    assert again.path != library.path
    assert again.path.read_bytes() == library.path.read_bytes()


_LOAD = """
import sys
from subquad.kernels.host.gpu_child import load_driver
load_driver(sys.argv[1])
import numpy
from pathlib import Path
from subquad.runtime.gpu_kernels import load_function
function = load_function(Path(sys.argv[2]), sys.argv[3])
shapes = [(1, 12, 5, 64)] * 3
arrays = [numpy.zeros(shape, numpy.float32) for shape in shapes]
arrays += [numpy.ones((1, 5), bool), *([numpy.zeros((1, 5), numpy.int64)] * 2), arrays[0].copy()]
try:
    function(*arrays)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.nvcc
@needs_nvcc
def test_library_loads_and_refuses_arrays_of_the_cpu(built: GpuBuild) -> None:
    """With a driver that knows no device: all symbols are there, the arguments are checked."""
    (library,) = [item for item in built.libraries if DENSE.overload in item.symbol]
    compiler = shutil.which("c++") or shutil.which("g++")
    command = [sys.executable, "-c", _LOAD, str(compiler), str(library.path), library.symbol]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "device" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def converted(built: GpuBuild, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    source = save_tiny_decoder(folder / "tiny.onnx")
    command = ["convert", str(source), str(folder / "out"), "--target", "cuda:sm_90"]
    done = CliRunner().invoke(cli, [*command, "--require-kernels"])
    assert done.exit_code == 0, done.output
    assert "cuda-sm_90: 1 of 1 attentions have a kernel, which has not run on a GPU" in done.output
    return folder / "out"


@pytest.mark.nvcc
@needs_nvcc
def test_artifact_has_kernels_and_runs_without_a_gpu(converted: Path) -> None:
    assert gpu_targets(converted) == ("sm_90",)
    manifest = Manifest.read(converted)
    (site,) = manifest.sites
    assert site.gpu_kernels == {"cuda-sm_90": "attention.cuda"}
    index = json.loads((converted / "kernels/cuda-sm_90/kernels.json").read_text())
    (kernel,) = index["kernels"]
    assert f"{kernel['op_type']}:{kernel['overload']}" == site.operator
    assert f"kernels/cuda-sm_90/{kernel['library']}" in manifest.files
    names = [spec["name"] for spec in kernel["inputs"]]
    assert names[:3] == ["query", "key", "value"]
    ids = np.arange(10, dtype=np.int64).reshape(2, 5)
    logits = subquad.load(converted).run({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert np.isfinite(logits["logits"]).all()


@pytest.mark.nvcc
@needs_nvcc
def test_loading_without_a_driver_is_an_error(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "DRIVER", "libno-such-driver.so.1")
    with pytest.raises(TargetUnavailableError, match="need an NVIDIA driver, but libno-such"):
        load_gpu_kernels(converted)


@pytest.mark.nvcc
@needs_nvcc
def test_a_gpu_of_another_kind_is_an_error(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "compute_capability", lambda device: (8, 9))
    with pytest.raises(
        TargetUnavailableError, match="is sm_89; the artifact has kernels for sm_90"
    ):
        load_gpu_kernels(converted)


def test_without_nvcc_it_is_said_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **kw: None if name == "nvcc" else which(name, **kw)
    )
    source = save_tiny_decoder(tmp_path / "tiny.onnx")
    command = ["convert", str(source), str(tmp_path / "out"), "--target", "cuda:sm_80"]
    done = CliRunner().invoke(cli, [*command, "--require-kernels"])
    assert done.exit_code == 6, done.output
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    (site,) = Manifest.read(tmp_path / "out").sites
    assert site.gpu_kernels["cuda-sm_80"].startswith("no kernel: ")
    with pytest.raises(TargetUnavailableError, match="has no CUDA kernels"):
        load_gpu_kernels(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.nvcc
@needs_nvcc
@pytest.mark.parametrize("target", [SM_80, SM_90], ids=lambda t: t.arch)
def test_every_kind_of_kernel_compiles(target: GpuTarget) -> None:
    def heads(dim: int) -> tuple[int, int, int, int, float]:
        return 8, 2, dim, dim, dim**-0.5

    common: list[OperatorVariant] = [
        AttentionVariant(*heads(64)),
        AttentionVariant(*heads(32), has_key_mask=True),
        AttentionVariant(*heads(128), window_left=255, window_right=0, softcap=30.0),
        HybridVariant(*heads(64), allowed_right=0, feature_map="elu"),
        HybridVariant(*heads(64), feature_map="elu", has_key_mask=True),
        HybridVariant(*heads(64), 63, 0, 4, allowed_right=0, feature_map="elu", has_key_mask=True),
    ]
    wide = AttentionVariant(*heads(256), window_right=0)
    built = build_gpu_kernels([*common, wide], target)
    assert not built.declined
    for library in built.libraries:
        for name, kernel in library.description["kernels"].items():
            assert kernel["spill_stores"] == kernel["spill_loads"] == 0, name
            if "d32v32" in name and kernel["dynamic_shared_memory"] > 1024:
                # Where sm_80 has shared memory for three blocks, ptxas would spill to fit a fourth.
                blocks = 3 if target is SM_80 else 4
                assert blocks * 256 * kernel["registers"] <= REGISTERS, name
                assert blocks * (kernel["dynamic_shared_memory"] + 1024) <= target.shared_memory


def launch_of(shared: int) -> Launch:
    tags = ("blockIdx.x", "threadIdx.x", "threadIdx.y", "tirx.use_dyn_shared_memory")
    return Launch(3, tags, ("batch * 8", "16", "16", str(shared)), shared)


def used(registers: int, spilled: int) -> dict[str, int]:
    return {
        "registers": registers,
        "spill_stores": spilled,
        "spill_loads": spilled,
        "static_shared_memory": 0,
    }


@pytest.mark.parametrize(
    ("shared", "registers", "spilled", "target", "blocks"),
    [
        (47_824, 64, 16, SM_80, 3),  # a fourth fits by registers alone
        (47_824, 64, 16, SM_90, None),  # four by shared memory: they are not spilled in vain
        (47_824, 64, 0, SM_80, None),  # nothing spilled
        (100_000, 255, 16, SM_80, None),  # one by either: more registers would not help
        (500_000, 64, 16, SM_80, None),  # has no room at all
    ],
)
def test_registers_spilled_in_vain_are_found(
    shared: int, registers: int, spilled: int, target: GpuTarget, blocks: int | None
) -> None:
    launches = {"list": launch_of(1024), "main": launch_of(shared)}
    usage = {"list": used(32, 0), "main": used(registers, spilled)}
    expected = {} if blocks is None else {"main": blocks}
    assert blocks_in_vain(launches, usage, target) == expected


def test_launch_bounds_are_put_into_the_source() -> None:
    source = """\
extern "C" __global__ void __launch_bounds__(256) a_kernel(float* x);
extern "C" __global__ void __launch_bounds__(256) a_kernel_1(float* x);
extern "C" __global__ void __launch_bounds__(256) a_kernel(float* x) {}
"""
    assert bound_launches(source, {}) == source
    assert bound_launches(source, {"a_kernel": 3}) == source.replace(
        "256) a_kernel(", "256, 3) a_kernel("
    )
    with pytest.raises(RuntimeError, match="TVM declared b_kernel in a form that is not known"):
        bound_launches(source, {"b_kernel": 3})


def test_unknown_targets_are_usage_errors() -> None:
    for text in ("cuda", "cuda:sm_20", "metal:m1", ""):
        with pytest.raises(UsageError, match="known: cuda:sm_80, cuda:sm_90"):
            parse_target(text)
    assert tuple(CUDA_TARGETS) == CUDA_ARCHS


def test_parameters_have_limits() -> None:
    with pytest.raises(ValueError, match="unknown kernel parameter 'row'"):
        GpuParameters().override({"row": 4})
    with pytest.raises(ValueError, match="multiple of 32"):
        GpuParameters(threads_x=5, threads_y=5)
    with pytest.raises(ValueError, match="a thread for each of its rows"):
        GpuParameters(threads_x=4, threads_y=8, rows=8)
    with pytest.raises(ValueError, match="the limit is 96"):
        GpuParameters(rows=8, keys=9).check_registers(DENSE.heads)
    assert refuse_sizes(DENSE.heads) is None


def test_the_report_of_ptxas_is_read() -> None:
    report = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_kernel' for 'sm_90'
ptxas info    : Function properties for a_kernel
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'b_kernel' for 'sm_90'
ptxas info    : Function properties for b_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""
    assert parse_usage(report) == {
        "a_kernel": {
            "registers": 80,
            "spill_stores": 4,
            "spill_loads": 12,
            "static_shared_memory": 1024,
        },
        "b_kernel": {
            "registers": 32,
            "spill_stores": 0,
            "spill_loads": 0,
            "static_shared_memory": 0,
        },
    }
    with pytest.raises(RuntimeError, match="form that is not known"):
        parse_usage("Compiling entry function something else")
