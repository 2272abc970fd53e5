"""Candidates in ONNX Runtime: what is wrong, crashes or hangs costs one candidate."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tiny_artifact
from subquad.converter.pipeline import convert
from subquad.kernels.host.targets import X86_64_V3
from subquad.kernels.operators import OPERATORS
from subquad.kernels.tuning import local
from subquad.kernels.tuning.checks import check_kernel, relative_error
from subquad.kernels.tuning.choose import DEFAULT_TUNING, TuningOptions, make_key, user_records
from subquad.kernels.tuning.local import LocalBench
from subquad.kernels.tuning.records import Record, append_records, read_records
from subquad.kernels.tuning.rounds import time_rounds
from subquad.kernels.tuning.search import Trial
from subquad.kernels.tuning.tune import find_target, shapes_of_artifact, tune
from subquad.kernels.tuning.workload import Workload, parse_shape
from subquad.runtime.errors import TargetUnavailableError, UsageError
from subquad.runtime.manifest import Manifest
from tiny_onnx import save_tiny_decoder
from tunable_kernels import (
    ALSO_RIGHT,
    COMPILER_DIES,
    DIES,
    HANGS,
    QUICK,
    REFUSES,
    RIGHT,
    SKIPS,
)
from tuning_cases import SMALL

Built = tuple[LocalBench, list[str]]


def test_what_cannot_be_compiled(bench: Built) -> None:
    _, refusals = bench
    prefix = "the kernel for x86-64-v3 was not compiled: "
    assert [mode for mode, refusal in enumerate(refusals) if refusal] == [REFUSES, COMPILER_DIES]
    assert refusals[REFUSES] == prefix + "ValueError: refused"
    assert refusals[COMPILER_DIES].startswith(
        prefix + "the compiler process was killed by signal 6"
    )


def measure(bench: LocalBench, mode: int, best: int = RIGHT, seconds: float = 60.0) -> Trial:
    return bench.measure({"mode": mode}, {"mode": best}, {"mode": RIGHT}, 3, seconds)


@pytest.mark.parametrize("best", [RIGHT, ALSO_RIGHT])
def test_right_kernels_are_timed(bench: Built, best: int) -> None:
    trial = measure(bench[0], ALSO_RIGHT, best)
    assert trial.status == "ok", trial.reason
    names = {"default", "candidate"} | ({"best"} if best != RIGHT else set())
    times = trial.times
    assert set(times) == names
    assert len({len(values) for values in times.values()}) == 1
    assert all(value > 0 for values in times.values() for value in values)


def test_unwritten_outputs_are_wrong(bench: Built) -> None:
    trial = measure(bench[0], SKIPS)
    assert (trial.status, trial.times) == ("wrong", {})
    assert "output at batch 1, 1 x 1: relative error nan" in trial.reason


def test_a_kernel_that_dies(bench: Built) -> None:
    trial = measure(bench[0], DIES)
    assert trial.status == "failed"
    assert "the measuring process was killed by signal 6" in trial.reason


def test_a_kernel_that_hangs(bench: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "START_SECONDS", 2.0)
    trial = measure(bench[0], HANGS, seconds=1.0)
    assert trial.status == "failed"
    assert trial.reason == "it took more than 3 s to measure"


def test_check_has_power() -> None:
    """One wrong key in two hundred, and a NaN, are found."""
    variant = SMALL[0]

    def off(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        value = feeds["value"].copy()
        value[0, 0, value.shape[2] // 2] *= 1.01
        return [np.asarray(variant.reference(**feeds | {"value": value}), np.float32)]

    def right(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(variant.reference(**feeds), np.float32)]

    assert check_kernel(variant, right, 0) == ""
    assert "relative error" in check_kernel(variant, off, 0)
    assert np.isnan(relative_error(np.array([np.nan, 1.0]), np.array([1.0, 1.0])))
    assert np.isnan(relative_error(np.array([np.inf]), np.array([-np.inf])))
    assert relative_error(np.array([-np.inf, 1.0]), np.array([-np.inf, 1.0])) == 0


def test_slow_candidates_are_given_up() -> None:
    """20 % slower than the best, in every round; 10 % is worth all rounds."""

    def times(candidate: float) -> dict[str, list[float]]:
        timers = {"default": lambda: 2.0, "best": lambda: 1.0, "candidate": lambda: candidate}
        return time_rounds(timers, 7, 1.15, time.monotonic() + 1e6)

    assert [len(values) for values in times(1.2).values()] == [3, 3, 3]
    assert times(1.1) == {"default": [2.0] * 7, "best": [1.0] * 7, "candidate": [1.1] * 7}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Convolution:num_heads=1", "unknown operator 'Convolution'; known: Attention,"),
        ("Attention:heads=1", "unknown name 'heads'; known: num_heads,"),
        ("Attention:num_heads=x", "num_heads: invalid literal"),
        ("Attention:num_heads", "num_heads: it needs a value"),
        ("Attention:num_heads=3,num_kv_heads=2,head_dim=4", "must be a multiple of num_kv_heads"),
        ("Attention:num_heads=2", "missing 3 required positional arguments"),
        ("Attention:num_heads=2,head_dim=4,queries=9,length=3", "query_len <= kv_len"),
        ("Attention:num_heads=2,head_dim=4,has_key_mask=maybe", "expected true or false"),
    ],
)
def test_bad_shapes(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_shape(text, OPERATORS)


def test_shapes() -> None:
    variant, workload = parse_shape(
        "HybridAttention:num_heads=4,num_kv_heads=2,head_dim=16,value_dim=8,allowed_right=0,"
        "feature_map=elu,has_key_mask,length=300,queries=1,batch=2",
        OPERATORS,
    )
    assert dataclasses.asdict(variant) == dataclasses.asdict(variant) | {  # type: ignore[call-overload]
        "num_kv_heads": 2,
        "value_dim": 8,
        "scale": 0.25,
        "feature_map": "elu",
        "has_key_mask": True,
    }
    assert workload == Workload(batch=2, kv_len=300, query_len=1)


def test_targets(tmp_path: Path) -> None:
    assert find_target("x86-64-v3") == X86_64_V3
    with pytest.raises(UsageError, match="Unknown target 'sm_90'; known: x86-64-v3"):
        find_target("sm_90")
    odd = dataclasses.replace(X86_64_V3, flags=("avx5124fmaps",))
    with pytest.raises(TargetUnavailableError, match="this processor lacks avx5124fmaps"):
        tune([SMALL], tmp_path / "none.jsonl", target=odd)
    with pytest.raises(UsageError, match="Nothing to tune"):
        tune([], tmp_path / "none.jsonl", target=X86_64_V3)


def test_tune_records_everything(quick: None, tmp_path: Path) -> None:
    """All four modes that compile; the two right ones are equally fast, so either may win."""
    path = tmp_path / "r.jsonl"
    report = tune([SMALL, SMALL], path, target=X86_64_V3, threads=1, templates=QUICK, trials=20)
    (kernel,) = report.kernels
    assert kernel.how == "tuned", kernel.reason
    assert kernel.params["mode"] in (RIGHT, ALSO_RIGHT)
    assert kernel.trials == {"ok": 1, "failed": 1, "wrong": 1}
    *trials, last = read_records(path)
    outcomes = {dict(item.params)["mode"]: item.status for item in trials}
    assert outcomes == {SKIPS: "wrong", DIES: "failed", ALSO_RIGHT: "ok"}
    assert last.confirmed and not any(item.confirmed for item in trials)
    assert all(item.reason for item in trials if item.status != "ok")


def test_untuned_is_said_and_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time to start anything: the defaults, and why; nothing is recorded."""
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    path = tmp_path / "r.jsonl"
    report = tune([SMALL], path, target=X86_64_V3, threads=1, templates=QUICK, seconds=1e-6)
    (kernel,) = report.kernels
    assert (kernel.how, kernel.params) == ("default", {})
    assert kernel.reason == (
        "the defaults were not compiled: the kernel for x86-64-v3 was not compiled: "
        "no time was left"
    )
    assert read_records(path) == []


KILLED = """
import sys
from pathlib import Path
from subquad.kernels.host.targets import X86_64_V3
from subquad.kernels.tuning.tune import tune
from tunable_kernels import QUICK
from tuning_cases import SMALL
tune([SMALL], Path(sys.argv[1]), target=X86_64_V3, threads=1, templates=QUICK, trials=20)
"""


def test_killed_search_goes_on(quick: None, tmp_path: Path) -> None:
    """SIGKILL after the first record: it is kept, and not measured again."""
    path = tmp_path / "r.jsonl"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    try:
        while not path.exists() or b"\n" not in path.read_bytes():
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        # With the process group: what measures must not go on alone.
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    before = read_records(path)
    assert before
    report = tune([SMALL], path, target=X86_64_V3, threads=1, templates=QUICK, trials=20)
    assert report.kernels[0].how == "tuned", report.kernels[0].reason
    after = [item for item in read_records(path) if not item.confirmed]
    assert after[: len(before)] == before
    bad = [dict(item.params)["mode"] for item in after if item.status != "ok"]
    assert sorted(bad) == [SKIPS, DIES]


@pytest.mark.slow
def test_convert_takes_records(tmp_path: Path) -> None:
    """Same records, same bytes; the manifest says of every site where its parameters come from."""
    source = save_tiny_decoder(tmp_path / "tiny.onnx")

    def converted(
        name: str, tuning: TuningOptions = DEFAULT_TUNING
    ) -> tuple[Path, dict[str, object]]:
        folder = tmp_path / name
        convert(source, folder, kernels="cpu", templates=QUICK, tuning=tuning)
        choices = [site.variants[-1]["tuning"]["x86-64-v3"] for site in Manifest.read(folder).sites]
        assert choices == choices[:1] * len(choices)
        return folder, choices[0]

    plain, choice = converted("plain", TuningOptions(on=False))
    assert choice["how"] == "default"
    variant, workload = shapes_of_artifact(plain)[0]
    key = make_key(variant, workload, X86_64_V3, QUICK["Attention"])
    mine = tmp_path / "mine.jsonl"
    tuned = Record(key, (("mode", ALSO_RIGHT),), "ok", (0.5, 0.6, 0.7), 21, True)
    append_records(mine, [tuned])
    first, choice = converted("first", TuningOptions(records=(mine,)))
    assert (choice["how"], choice["params"]) == ("tuned", {"mode": ALSO_RIGHT})
    append_records(user_records(), [tuned])
    try:
        second, choice = converted("by the user's own file")
    finally:
        user_records().unlink()
    assert choice["how"] == "tuned"
    files = [p for p in sorted(first.rglob("*")) if p.is_file() and p.stem != "report"]
    assert any(path.suffix == ".so" for path in files)
    for path in files:
        assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path


def test_old_artifacts_are_refused(tmp_path: Path) -> None:
    folder = tiny_artifact.build(tmp_path / "old")
    with pytest.raises(UsageError, match="does not say what its attentions compute"):
        shapes_of_artifact(folder)
