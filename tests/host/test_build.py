"""Building libraries: what fails costs its kernel only, and nothing is built twice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kernel_nodes import (
    ABORTING,
    BANDED,
    CAPPED,
    FAILING,
    MASKED,
    NAMELESS,
    PLAIN,
    REFUSED,
    RIGHT,
    SKIPPING,
    TEMPLATES,
)
from subquad.kernels.host import build
from subquad.kernels.host.build import (
    Job,
    KernelBuild,
    build_kernels,
    compile_jobs,
    variant_key,
)
from subquad.kernels.host.targets import X86_64_V3, X86_64_V4, host_targets
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.kernel import CpuTarget
from subquad.runtime import kernel_tools
from subquad.runtime.errors import Rejection
from subquad.runtime.machine import cpu_flags

HYBRID = HybridVariant(2, 2, 4, 4, 0.5, allowed_right=0, feature_map="elu")


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any) -> NoReturn:
        raise AssertionError("TVM was started")

    monkeypatch.setattr(build, "_running", run)


def test_one_bad_kernel_costs_no_other(built: KernelBuild) -> None:
    good = {variant_key(variant) for variant in (*RIGHT, FAILING, SKIPPING)}
    assert set(built.served) == good
    reasons = {key: rejection.reason for key, rejection in built.declined.items()}
    assert set(reasons) == {variant_key(v) for v in (REFUSED, NAMELESS, ABORTING, CAPPED)}
    prefix = "the kernel for x86-64-v3 was not compiled: "
    assert reasons[variant_key(CAPPED)] == "slow kernels know no softcap, got 2.5"
    assert reasons[variant_key(REFUSED)] == (
        prefix + "ValueError: no kernel for 11 heads and parameters []"
    )
    assert reasons[variant_key(NAMELESS)].startswith(
        prefix + "ValueError: the template must name its function 'subquad_h9kv1"
    )
    assert reasons[variant_key(ABORTING)].startswith(
        prefix + "the compiler process was killed by signal 6"
    )


def test_built_things_are_not_built_again(
    built: KernelBuild, library: Path, cache: Path, no_child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in (cache / "kernels").iterdir()}
    variants = (*RIGHT, FAILING, SKIPPING)
    again = build_kernels(variants[::-1], targets=[X86_64_V3], templates=TEMPLATES)
    assert again.libraries == built.libraries
    assert {path: path.stat().st_mtime_ns for path in (cache / "kernels").iterdir()} == before


def test_what_matters_is_part_of_the_key(built: KernelBuild, no_child: None) -> None:
    def builds(**changed: Any) -> bool:
        arguments: dict[str, Any] = {"targets": [X86_64_V3], "templates": TEMPLATES}
        try:
            build_kernels([PLAIN], **arguments | changed)
        except AssertionError:
            return True
        return False

    assert not builds()
    assert builds(targets=[X86_64_V4])
    assert builds(params=lambda variant, target: {"tile": 8})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "version", lambda package: version(package) + ".dev1")
        assert builds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_source_hash", lambda template: "other sources")
        assert builds()


def test_equal_inputs_give_equal_bytes(
    built: KernelBuild, library: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are TVM's, compiled again; the library is linked again, elsewhere."""
    first = build_kernels([BANDED], targets=[X86_64_V3], templates=TEMPLATES).libraries[0].path
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "elsewhere"))
    second = build_kernels([BANDED], targets=[X86_64_V3], templates=TEMPLATES).libraries[0].path
    assert second.is_relative_to(tmp_path)
    assert second.read_bytes() == first.read_bytes()
    for private in (str(tmp_path), str(cache), os.getcwd(), "subquad-kernels-"):
        assert private.encode() not in second.read_bytes()


def test_slow_compilation_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    result = build_kernels([MASKED], targets=[X86_64_V3], templates=TEMPLATES, kernel_seconds=0.05)
    assert result.libraries == ()
    assert "it took more than 0.05 s" in result.declined[variant_key(MASKED)].reason


def test_compilers_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five kernels in one process and two in another, both before either is waited for;
    what one leaves undone after a crash goes on in another."""
    jobs = [Job(PLAIN, "t:T", X86_64_V3, {"tile": n}, tmp_path / f"{n}.o") for n in range(5)]
    seen: list[list[int]] = []

    @contextmanager
    def running(part: Sequence[Job]) -> Iterator[Callable[..., build._Child]]:
        seen.append([job.params["tile"] for job in part])
        begun = len(seen)

        def wait(kernel_seconds: float, deadline: float) -> build._Child:
            assert len(seen) > begun or begun in (2, 3), "the first was waited for alone"
            for job in part:
                if job.params["tile"] == 2 and begun == 1:
                    return build._Child(True, [None] * len(part), "it crashed")
                if job.params["tile"] != 1:
                    job.object.touch()
            errors = ["refused" if job.params["tile"] == 1 else None for job in part]
            return build._Child(True, errors, "")

        yield wait

    monkeypatch.setattr(build, "_running", running)
    failed = compile_jobs(jobs, 1.0, workers=2)
    assert seen == [[0, 2, 4], [1, 3], [4]]
    assert {path.stem: refusal.reason.rpartition(": ")[2] for path, refusal in failed.items()} == {
        "1": "refused",
        "2": "it crashed",
    }


def test_number_of_compilers_changes_nothing(
    built: KernelBuild, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel is compiled after other ones than in ``built``; one compiler crashes."""
    good = [PLAIN, BANDED, MASKED]
    first = build_kernels(good, targets=[X86_64_V3], templates=TEMPLATES).libraries[0].path
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    # One crashes at once and is followed by one for BANDED alone.
    variants = [ABORTING, *good]
    again = build_kernels(variants, targets=[X86_64_V3], templates=TEMPLATES, workers=2)
    key = variant_key(ABORTING)
    assert again.declined == {key: built.declined[key]}
    objects = sorted((tmp_path / "kernels").glob("*.o"))
    assert len(objects) == len(good)
    for path in objects:
        assert path.read_bytes() == (cache / "kernels" / path.name).read_bytes()
    assert again.libraries[0].path.read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    ("memory", "compilers"),
    [(None, 8), (64 * 2**30, 8), (2 * 2**30, 3), (2**20, 1)],
)
def test_compilers_are_as_many_as_fit_memory(
    memory: int | None, compilers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: 8)
    monkeypatch.setattr(build, "available_bytes", lambda: memory)
    assert build.compilers_at_once() == compilers


def test_a_build_uses_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    seen = []

    def compile_none(jobs: Sequence[Job], *limits: float, workers: int = 1) -> dict[Path, Any]:
        seen.append(workers)
        return {job.object: Rejection("not today") for job in jobs}

    monkeypatch.setattr(build, "compile_jobs", compile_none)
    monkeypatch.setattr(build, "compilers_at_once", lambda: 5)
    build_kernels([PLAIN], targets=[X86_64_V3], templates=TEMPLATES)
    build_kernels([PLAIN], targets=[X86_64_V3], templates=TEMPLATES, workers=3)
    assert seen == [5, 3]


@pytest.mark.parametrize("workers", [1, 2])
def test_broken_tvm_is_tried_once(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each compiler."""
    (tmp_path / "tvm.py").write_text("open('runs', 'a').write('x')\nraise ImportError('no llvm')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    result = build_kernels(
        [PLAIN, BANDED, MASKED], targets=[X86_64_V3], templates=TEMPLATES, workers=workers
    )
    assert (tmp_path / "runs").read_text() == "x" * workers
    assert set(result.declined) == {variant_key(v) for v in (PLAIN, BANDED, MASKED)}
    assert all(
        r.reason.endswith("status 1: ImportError: no llvm") for r in result.declined.values()
    )


def test_no_compiler(no_child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    result = build_kernels([PLAIN], templates=TEMPLATES)
    assert result == KernelBuild(declined=result.declined)
    assert "no C++ compiler was found" in result.declined[variant_key(PLAIN)].reason


@pytest.mark.parametrize(
    ("found", "reason"),
    [(None, "apache-tvm is not installed: pip"), ("0.31.2", "apache-tvm is 0.31.2, kernels need")],
)
def test_no_fitting_tvm(
    found: str | None, reason: str, no_child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(package: str) -> str:
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr(kernel_tools, "version", look_up)
    result = build_kernels([PLAIN], templates=TEMPLATES)
    assert result.declined[variant_key(PLAIN)].reason.startswith(reason)


def test_other_systems_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    missing = build.missing_tools()
    assert missing is not None
    assert missing.reason == "kernels are built on Linux x86-64 only, this is linux aarch64"


def test_broken_compiler_is_a_reason(
    built: KernelBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'broken: error: no disk' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    result = build_kernels([PLAIN], targets=[X86_64_V3], templates=TEMPLATES)
    assert result.libraries == ()
    assert result.declined[variant_key(PLAIN)].reason == (
        "the kernel library could not be linked: broken: error: no disk"
    )


@pytest.mark.parametrize("templates", [{}, {"HybridAttention": "subquad.kernels.nowhere:T"}])
def test_operator_without_template(templates: dict[str, str], no_child: None) -> None:
    result = build_kernels([HYBRID], templates=templates)
    assert "has no kernel template" in result.declined[variant_key(HYBRID)].reason


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "file"))
    folder = build.cache_folder()
    assert folder.is_dir() and not folder.is_relative_to(tmp_path)
    shutil.rmtree(folder)


def test_targets_of_this_machine() -> None:
    first, *others = host_targets()
    assert first == X86_64_V3
    assert all(cpu_flags().issuperset(target.flags) for target in others)


def test_library_says_what_the_processor_lacks(
    built: KernelBuild, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels, declared to need what no x86-64 processor has together."""
    import onnxruntime

    demanding = CpuTarget("demanding", "x86-64-v3", flags=("sse4a", "avx5124fmaps"))
    key = build.object_key(PLAIN, TEMPLATES["Attention"], demanding, {})
    object_file = build.cache_folder() / f"{key}.o"
    known = build.object_key(PLAIN, TEMPLATES["Attention"], X86_64_V3, {})
    shutil.copyfile(build.cache_folder() / f"{known}.o", object_file)
    result = build_kernels([PLAIN], targets=[demanding], templates=TEMPLATES)
    with pytest.raises(Exception, match="for demanding cannot run here: this processor has no"):
        onnxruntime.SessionOptions().register_custom_ops_library(str(result.libraries[0].path))
