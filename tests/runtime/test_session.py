from __future__ import annotations

import builtins
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from subquad.runtime.errors import SubquadError, TargetUnavailableError
from subquad.runtime.session import onnxruntime, open_session, run_session
from tiny_artifact import feeds


def slow_model() -> bytes:
    """Thousands of matrix products, one after the other."""
    names = [f"v{i}" for i in range(3000)]
    nodes = [
        helper.make_node("MatMul", [a, "x"], [b])
        for a, b in zip(["x", *names[:-1]], names, strict=True)
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "slow",
        [info("x", TensorProto.FLOAT, ["n", "n"])],
        [info(names[-1], TensorProto.FLOAT, ["n", "n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    content: bytes = onnx.ModelProto.SerializeToString(model)
    return content


@pytest.mark.parametrize("restarting", [False, True])
def test_ctrl_c_stops_a_run(tmp_path: Path, restarting: bool) -> None:
    # Some native libraries make system calls restart after a signal.
    signal.siginterrupt(signal.SIGINT, not restarting)
    session = open_session(slow_model(), folder=tmp_path, threads=1)
    feed = {"x": np.eye(500, dtype=np.float32)}
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    start = time.monotonic()
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_session(session, feed, ["v2999"])
    finally:
        signal.siginterrupt(signal.SIGINT, True)
    assert time.monotonic() - start < 5.0
    # and the session still works
    one = {"x": np.ones((1, 1), np.float32)}
    assert run_session(session, one, ["v2999"])[0] == 1.0


def test_runs_from_another_thread(decoder: Path) -> None:
    session = open_session(decoder / "model.onnx", folder=decoder, threads=1)
    results: list[Any] = []
    worker = threading.Thread(
        target=lambda: results.extend(run_session(session, feeds(), ["logits"]))
    )
    worker.start()
    worker.join()
    assert np.array_equal(results[0], run_session(session, feeds(), ["logits"])[0])


def test_errors_carry_onnxruntime_s_reason_on_one_line(decoder: Path) -> None:
    session = open_session(decoder / "model.onnx", folder=decoder)
    bad = feeds() | {"input_ids": np.zeros((2, 9), np.float32)}
    with pytest.raises(SubquadError, match="^ONNX Runtime failed: Unexpected input data type") as e:
        run_session(session, bad, ["logits"])
    assert "\n" not in str(e.value)


def test_onnxruntime_missing_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "onnxruntime":
            raise ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(TargetUnavailableError, match=r"subquad\[cpu\].*subquad\[gpu\]"):
        onnxruntime()


def test_onnxruntime_broken_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError("libstdc++.so.6: version not found")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(TargetUnavailableError, match="installed but cannot be loaded: libstdc"):
        onnxruntime()
