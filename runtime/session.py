"""ONNX Runtime sessions: opened for a named provider, interruptible, errors in our words."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from subquad.runtime.errors import SubquadError, TargetUnavailableError, UsageError

Feeds = Mapping[str, NDArray[Any]]

PROVIDERS: Mapping[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "dml": "DmlExecutionProvider",
}
"""Short names; any full ``...ExecutionProvider`` name is accepted as well."""

CPU = PROVIDERS["cpu"]

QUIET_THREADS: Mapping[str, str] = {"session.intra_op.allow_spinning": "0"}
"""Idle threads sleep: two sessions that take turns do not spin against each other."""


def onnxruntime() -> types.ModuleType:
    """The ``onnxruntime`` module.

    Raises:
        TargetUnavailableError: not installed, or installed and broken.
    """
    try:
        import onnxruntime as module
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise TargetUnavailableError(f"ONNX Runtime cannot be imported: {error}.") from error
        raise TargetUnavailableError(
            "ONNX Runtime is not installed. Install one of: pip install 'subquad[cpu]' or, for "
            "NVIDIA GPUs, pip install 'subquad[gpu]' (never both)."
        ) from error
    except ImportError as error:
        raise TargetUnavailableError(
            f"ONNX Runtime is installed but cannot be loaded: {error}. "
            "`subquad doctor` shows what is installed."
        ) from error
    return module  # type: ignore[no-any-return]


def provider_name(provider: str) -> str:
    """ONNX Runtime's name of a provider given by short or full name."""
    full = PROVIDERS.get(provider.lower(), provider)
    if not full.endswith("ExecutionProvider"):
        raise UsageError(
            f"Unknown provider {provider!r}. Use one of {', '.join(PROVIDERS)}, or the full name "
            "of an ONNX Runtime provider."
        )
    return full


def open_session(
    model: Path | bytes,
    *,
    folder: Path,
    provider: str = "cpu",
    threads: int | None = None,
    config: Mapping[str, str] | None = None,
    libraries: Sequence[Path] = (),
    arena: bool = True,
) -> Any:
    """An ``InferenceSession`` that really has ``provider``.

    Args:
        model: path, or the bytes of a model whose external data lie in ``folder``.
        folder: where external data are.
        provider: short or full name. Operators the provider lacks run on the CPU.
        threads: for one operator; ``None`` leaves the choice to ONNX Runtime.
        config: further session configuration entries.
        libraries: custom-op libraries, by absolute path.
        arena: whether the session keeps the memory of a run for the next one.

    Raises:
        TargetUnavailableError: the provider is not built in, or could not start; a library cannot
            be loaded.
        SubquadError: ONNX Runtime refuses the model.
    """
    ort = onnxruntime()
    wanted = provider_name(provider)
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, got {threads}.")
    if wanted not in ort.get_available_providers():
        have = ", ".join(ort.get_available_providers())
        hint = " Install subquad[gpu] instead of subquad[cpu]." if "CUDA" in wanted else ""
        raise TargetUnavailableError(
            f"Provider {wanted} is not part of the installed ONNX Runtime {ort.__version__}, "
            f"which has {have}.{hint}"
        )
    options = ort.SessionOptions()
    # 4 = fatal only: an error arrives as an exception, and needs no second telling on stderr.
    options.log_severity_level = 4
    options.inter_op_num_threads = 1
    if not arena:
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
    if threads is not None:
        options.intra_op_num_threads = threads
    if isinstance(model, bytes):
        # Without it external data of a model given as bytes are looked up in the working
        # directory, and refused since ONNX Runtime 1.24.
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder)
        )
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    for library in libraries:
        _register(options, library, ort.__version__)
    providers = [wanted] if wanted == CPU else [wanted, CPU]
    source = model if isinstance(model, bytes) else str(model)
    what = "the model" if isinstance(model, bytes) else model.name
    with translated_errors(f"ONNX Runtime {ort.__version__} cannot load {what}"):
        # enable_fallback=0: the fallback prints to stdout and hides the failure.
        session = ort.InferenceSession(source, options, providers=providers, enable_fallback=0)
    # The list of available providers is a wish; only the session knows what started.
    if wanted not in session.get_providers():
        raise TargetUnavailableError(
            f"Provider {wanted} is part of ONNX Runtime {ort.__version__} but did not start on "
            f"this machine; the session has {', '.join(session.get_providers())}. Check the "
            "driver and its libraries (`subquad doctor`)."
        )
    return session


def _register(options: Any, library: Path, version: str) -> None:
    try:
        with translated_errors(f"ONNX Runtime {version} cannot load {library.name}"):
            options.register_custom_ops_library(str(library))
    except SubquadError as error:
        raise TargetUnavailableError(
            f"{error} To run the ONNX functions instead of kernels: --kernels off, or "
            "load(..., kernels='off')."
        ) from error


_INTERRUPT_POLL = 0.1
"""Seconds after which a waiting main thread looks for Ctrl-C."""


def run_session(session: Any, feeds: Feeds, names: Sequence[str]) -> list[NDArray[Any]]:
    """``session.run``, which Ctrl-C stops within one operator.

    Python delivers signals to the main thread only, and only outside of C++. So the main thread
    waits while another runs the session, and tells it to stop.
    """
    return _interruptible(session.run, list(names), dict(feeds))


def run_ort_values(session: Any, feeds: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """The same with ``OrtValue`` objects, which are not copied."""
    return _interruptible(session.run_with_ort_values, list(names), dict(feeds))


def _interruptible(run: Callable[..., Any], names: list[str], feeds: dict[str, Any]) -> list[Any]:
    ort = onnxruntime()
    if threading.current_thread() is not threading.main_thread():
        with translated_errors("ONNX Runtime failed"):
            return list(run(names, feeds))
    options = ort.RunOptions()
    options.log_severity_level = 4
    with ThreadPoolExecutor(1, "subquad-run") as executor:
        try:
            # Inside: an interrupt may come before `submit` has returned.
            future = executor.submit(run, names, feeds, options)
            # In short waits: where another library has made interrupted system calls restart
            # (SA_RESTART), Python sees the interrupt only when a wait ends.
            while not future.done():
                wait([future], timeout=_INTERRUPT_POLL)
        except BaseException:
            options.terminate = True
            raise  # leaving the executor waits until the run has stopped
        with translated_errors("ONNX Runtime failed"):
            return list(future.result())


@dataclass(frozen=True)
class BoundRun:
    """A session with its inputs in place: nothing is copied, the output stays where it is made.

    What a run of a node inside a graph costs, for timings.
    """

    session: Any
    binding: Any
    feeds: Feeds  # the binding borrows their memory

    @staticmethod
    def bind(session: Any, feeds: Feeds) -> BoundRun:
        """Bind inputs and outputs."""
        binding = session.io_binding()
        for item in session.get_inputs():
            binding.bind_cpu_input(item.name, feeds[item.name])
        for item in session.get_outputs():
            binding.bind_output(item.name)
        return BoundRun(session, binding, feeds)

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)

    def output(self) -> NDArray[Any]:
        """A copy of the first output of the last run."""
        copied: NDArray[Any] = self.binding.copy_outputs_to_cpu()[0]
        return copied


TURNS: Mapping[str, str] = {"session.force_spinning_stop": "1"}
"""Threads of a session stop spinning when its run ends: the next session's cores are free."""


@contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Raise ONNX Runtime's exceptions as ``SubquadError`` with the reason."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    # They share no base class of their own. The set differs between releases.
    kinds = tuple(
        kind
        for kind in vars(state).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    )
    try:
        yield
    except kinds as error:
        raise SubquadError(f"{what}: {_reason(error)}") from error
    # Raised by the pybind layer for what it cannot convert, and for lack of memory.
    except (RuntimeError, ValueError, MemoryError) as error:
        raise SubquadError(f"{what}: {_reason(error) or type(error).__name__}") from error


def _reason(error: BaseException) -> str:
    """The message on one line, without ONNX Runtime's ``[ONNXRuntimeError] : code :`` prefix."""
    text = " ".join(str(error).split())
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    return text
