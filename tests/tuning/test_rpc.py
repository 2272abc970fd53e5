"""Tuning over TVM's own RPC tracker with two servers, all on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from subquad.kernels.host.targets import X86_64_V3
from subquad.kernels.tuning import rpc
from subquad.kernels.tuning.records import read_records
from subquad.kernels.tuning.rpc import RpcBench, open_tracker
from subquad.kernels.tuning.tune import tune
from subquad.runtime.errors import TargetUnavailableError, UsageError
from tunable_kernels import ALSO_RIGHT, DIES, HANGS, QUICK, RIGHT, SKIPS, TEMPLATES
from tuning_cases import SMALL

KEY = "loopback"


@pytest.mark.parametrize("address", ["nowhere", ":1", "host:", "host:0", "host:x"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(UsageError, match="--rpc needs host:port"), open_tracker(address, KEY):
        pass


@pytest.mark.slow  # needs the packages of subquad[tune]
def test_no_tracker() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with (
            pytest.raises(TargetUnavailableError, match="No RPC tracker answers"),
            open_tracker(address, KEY),
        ):
            pass


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "NEEDS", ("cloudpickle", "no_such_package"))
    with (
        pytest.raises(UsageError, match=r"no_such_package.*pip install 'subquad\[tune\]'"),
        open_tracker("127.0.0.1:1", KEY),
    ):
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(module: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, "--host", "127.0.0.1", *map(str, arguments)]
    return subprocess.Popen(command, start_new_session=True)


@pytest.fixture(scope="module")
def tracker() -> Iterator[str]:
    """Address of a tracker with two servers of ``KEY``."""
    pytest.importorskip("tvm", reason="apache-tvm is not installed")
    port = _free_port()
    address = f"127.0.0.1:{port}"
    processes = [
        _start("tvm.exec.rpc_tracker", "--port", port, "--port-end", port + 1),
    ]
    for _ in range(2):
        own = _free_port()
        ports = ("--port", own, "--port-end", own + 20)
        processes.append(_start("tvm.exec.rpc_server", *ports, "--tracker", address, "--key", KEY))
    try:
        end = time.monotonic() + 180
        while _servers(address) < 2:
            assert time.monotonic() < end, "the servers did not register"
            assert all(process.poll() is None for process in processes)
            time.sleep(1)
        yield address
    finally:
        for process in processes:
            # With the group: servers work in processes of their own.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _servers(address: str) -> int:
    try:
        with open_tracker(address, KEY) as found:
            return len(found.workers)
    except TargetUnavailableError:
        return 0


@pytest.mark.slow
def test_unknown_key(tracker: str) -> None:
    with (
        pytest.raises(TargetUnavailableError, match=r"key 'other' .*free servers: loopback \(2\)"),
        open_tracker(tracker, "other"),
    ):
        pass


@pytest.mark.slow
def test_outcomes(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, wrong, crashing and hanging kernels, as on this machine; the servers live on."""
    monkeypatch.setattr(rpc, "START_SECONDS", 40.0)
    with open_tracker(tracker, KEY) as found:
        bench = RpcBench(*SMALL, X86_64_V3, TEMPLATES, tracker=found)
        assert bench.lanes == 2
        modes = (RIGHT, ALSO_RIGHT, SKIPS, DIES, HANGS)
        assert bench.prepare([{"mode": mode} for mode in modes], 300.0) == [""] * len(modes)
        right = {"mode": RIGHT}
        trial = bench.measure({"mode": ALSO_RIGHT}, right, right, 3, 30.0)
        assert trial.status == "ok", trial.reason
        assert set(trial.times) == {"default", "candidate"}
        trial = bench.measure({"mode": SKIPS}, right, right, 3, 30.0)
        assert trial.status == "wrong", trial.reason
        assert "relative error nan" in trial.reason
        for mode in (DIES, HANGS):
            trial = bench.measure({"mode": mode}, right, right, 3, 1.0)
            assert trial.status == "failed"
            assert trial.reason
        trial = bench.measure({"mode": ALSO_RIGHT}, {"mode": ALSO_RIGHT}, right, 3, 30.0)
        assert trial.status == "ok", trial.reason


@pytest.mark.slow
def test_tune_over_rpc(tracker: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    report = tune(
        [SMALL],
        path,
        target=X86_64_V3,
        threads=1,
        templates=QUICK,
        rpc=(tracker, KEY),
        trials=20,
    )
    (kernel,) = report.kernels
    assert kernel.how == "tuned", kernel.reason
    assert kernel.trials == {"ok": 1, "failed": 1, "wrong": 1}
    records = read_records(path)
    assert {item.machine for item in records} == {f"rpc {KEY}"}
    assert records[-1].confirmed
