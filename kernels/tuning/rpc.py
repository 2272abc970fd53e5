"""Candidates on other machines: compiled here, run there by TVM's RPC servers.

``python -m tvm.exec.rpc_tracker`` and ``python -m tvm.exec.rpc_server --tracker … --key …`` are
TVM's own; every free server of the key measures one candidate at a time. TVM's protocol is neither
encrypted nor authenticated: it belongs into trusted networks only.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any

from subquad.kernels.templates.space import Params
from subquad.kernels.tuning.candidates import CandidateBench
from subquad.kernels.tuning.search import Trial
from subquad.runtime.errors import TargetUnavailableError, UsageError

START_SECONDS = 60.0
"""For starting TVM, getting a server and the check, on top of the time to measure."""

CONNECT_SECONDS = 5.0

NEEDS = ("cloudpickle", "psutil", "tornado")
"""Packages that TVM's RPC imports and does not declare: the extra ``tune``."""


@dataclass(frozen=True)
class Tracker:
    """Where candidates are measured.

    Attributes:
        host, port: of the tracker.
        key: of the servers.
        workers: processes that talk to them, one per server.
    """

    host: str
    port: int
    key: str
    workers: Sequence[_Worker]

    def ask(self, task: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request by the next free worker; see ``rpc_child.py``."""
        worker = self._idle.get()
        try:
            return worker.ask({**task, "host": self.host, "port": self.port}, seconds)
        finally:
            self._idle.put(worker)

    _idle: SimpleQueue[_Worker] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        for worker in self.workers:
            self._idle.put(worker)


@contextmanager
def open_tracker(address: str, key: str) -> Iterator[Tracker]:
    """Connect to the tracker at ``host:port`` and count its free servers of ``key``.

    Raises:
        UsageError: no address, or a package that TVM's RPC needs is missing.
        TargetUnavailableError: no tracker there, or no free server of this key.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--rpc needs host:port, got {address!r}.")
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"Tuning over RPC needs {', '.join(missing)}, which is not installed: "
            "pip install 'subquad[tune]'."
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise TargetUnavailableError(
            f"No RPC tracker answers at {address}: {error}. "
            "Start one: python -m tvm.exec.rpc_tracker."
        ) from error
    first = _Worker()
    workers = [first]
    try:
        task = {"do": "summary", "host": host, "port": int(port)}
        reply = first.ask(task, START_SECONDS)
        free = reply.get("free", {})
        if "failed" in reply or not free.get(key):
            others = ", ".join(f"{name} ({count})" for name, count in free.items()) or "none"
            reason = reply.get("failed") or f"free servers: {others}"
            raise TargetUnavailableError(
                f"No server of key {key!r} is free at the tracker {address}; {reason}."
            )
        workers += [_Worker() for _ in range(free[key] - 1)]
        yield Tracker(host, int(port), key, workers)
    finally:
        for worker in workers:
            worker.close()


@dataclass(kw_only=True)
class RpcBench(CandidateBench):
    """See ``search.Bench``; as many candidates at once as there are servers of ``tracker``."""

    tracker: Tracker
    hosted: bool = False

    @property
    def lanes(self) -> int:
        return len(self.tracker.workers)

    def measure(
        self, candidate: Params, best: Params, default: Params, rounds: int, seconds: float
    ) -> Trial:
        task = self.task(candidate, best, default, rounds, seconds)
        task |= {"do": "measure", "key": self.tracker.key, "start_seconds": START_SECONDS}
        reply = self.tracker.ask(task, task["seconds"] + START_SECONDS)
        if "times" in reply:
            return Trial("ok", times=reply["times"])
        if "wrong" in reply:
            return Trial("wrong", reply["wrong"])
        return Trial("failed", reply["failed"])


class _Worker:
    """A child process that speaks TVM's protocol; started when needed, and again after a crash."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()

    def ask(self, task: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The reply; ``{"failed": reason}`` where there is none."""
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(task).encode() + b"\n")
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], seconds)
            line = child.stdout.readline() if ready else b""
        except BrokenPipeError:
            ready, line = [child.stdout], b""
        if line.endswith(b"\n"):
            reply: dict[str, Any] = json.loads(line)
            return reply
        self._kill()
        if not ready:
            return {"failed": f"no answer within {seconds:.0f} s"}
        return {"failed": f"the RPC client ended with status {child.returncode}{self._last()}"}

    def close(self) -> None:
        self._kill()
        self._log.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "subquad.kernels.host.rpc_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
            )
        return self._child

    def _kill(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()
        self._child = None

    def _last(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""
