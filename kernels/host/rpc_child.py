"""Check and time candidates on machines of a TVM RPC tracker: the child process of
``kernels/tuning/rpc.py``.

A request is one JSON line on standard input, its reply one on standard output:

    {"do": "summary", "host": …, "port": …}  ->  {"free": {"key": 2, …}}
    {"do": "measure", "key": …, "libraries": {"default": "/…/a.so", …}, …}  ->
        {"times": {…}}, {"wrong": "…"} or {"failed": "…"}

On a server the TVM runtime runs the kernel by itself: ONNX Runtime takes no part. Every
measurement is a session of its own, which a server runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.host.compile_child import make_variant
from subquad.kernels.kernel import kernel_symbol
from subquad.kernels.operator import Dim, OperatorVariant, present_inputs
from subquad.kernels.tuning.checks import check_kernel, compare
from subquad.kernels.tuning.rounds import repeats_for, time_rounds
from subquad.kernels.tuning.workload import Feeds, Workload


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    # What TVM or a library prints must not get between the replies.
    os.dup2(2, 1)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            reply = {"summary": _summary, "measure": _measure}[task["do"]](task)
        # What TVM raises for a lost connection, a crashed server or a kernel that fails.
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            reply = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        print(json.dumps(reply), file=replies)


def _summary(task: Mapping[str, Any]) -> dict[str, Any]:
    from tvm import rpc

    tracker = rpc.connect_tracker(task["host"], task["port"])
    queues = tracker.summary()["queue_info"]
    return {"free": {key: int(queue["free"]) for key, queue in queues.items()}}


def _measure(task: Mapping[str, Any]) -> dict[str, Any]:
    from tvm import rpc

    end = time.monotonic() + task["seconds"]
    variant = make_variant(task["variant"], task["fields"])
    tracker = rpc.connect_tracker(task["host"], task["port"])
    remote = tracker.request(
        task["key"], max_retry=1, session_timeout=round(task["seconds"] + task["start_seconds"])
    )
    device = remote.cpu(0)
    remote.get_function("runtime.config_threadpool")(1, task["threads"])
    modules = {}
    for name, library in task["libraries"].items():
        remote.upload(library, target=f"{name}.so")
        modules[name] = remote.load_module(f"{name}.so")
    kernels = {name: _Kernel(variant, module, device) for name, module in modules.items()}
    wrong = check_kernel(variant, kernels["candidate"].run, task["seed"])
    if wrong:
        return {"wrong": wrong}
    feeds = Workload(**task["workload"]).feeds(variant, task["seed"])
    wrong = compare(variant, kernels["candidate"].run(feeds), kernels["default"].run(feeds))
    if wrong:
        return {"wrong": wrong}
    repeats = repeats_for(kernels["default"].timer(feeds, 1)())
    timers = {name: kernel.timer(feeds, repeats) for name, kernel in kernels.items()}
    return {"times": time_rounds(timers, task["rounds"], task["give_up"], end)}


class _Kernel:
    """A kernel on a remote device."""

    def __init__(self, variant: OperatorVariant, module: Any, device: Any) -> None:
        self._variant = variant
        self._module = module
        self._device = device

    def run(self, feeds: Feeds) -> Sequence[NDArray[Any]]:
        arguments = self._arguments(feeds)
        self._module[kernel_symbol(self._variant)](*arguments)
        return [tensor.numpy() for tensor in arguments[-len(self._variant.outputs) :]]

    def timer(self, feeds: Feeds, repeats: int) -> Callable[[], float]:
        """Seconds of one call by the remote machine's clock, the network left out."""
        arguments = self._arguments(feeds)
        evaluator = self._module.time_evaluator(
            kernel_symbol(self._variant), self._device, number=repeats, repeat=1
        )
        return lambda: float(evaluator(*arguments).results[0])

    def _arguments(self, feeds: Feeds) -> list[Any]:
        """The inputs, and outputs full of NaN, which show what a kernel does not write."""
        import tvm

        inputs = [feeds[name] for name in present_inputs(self._variant)]
        arrays = [*inputs, *_empty_outputs(self._variant, feeds)]
        return [tvm.runtime.tensor(array, self._device) for array in arrays]


def _empty_outputs(variant: OperatorVariant, feeds: Feeds) -> list[NDArray[Any]]:
    sizes: dict[Dim, int] = {}
    for spec in variant.inputs:
        if spec is not None:
            sizes.update(zip(spec.dims, feeds[spec.name].shape, strict=True))

    def size(dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        return sizes[dim] if isinstance(dim, str) else -(-sizes[dim.dim] // dim.size)

    outputs = []
    for spec in variant.outputs:
        shape = tuple(size(dim) for dim in spec.dims)
        fill = np.nan if spec.dtype == "float32" else -1
        outputs.append(np.full(shape, fill, dtype=spec.dtype))
    return outputs


if __name__ == "__main__":
    main()
