"""What this machine can do, what is missing, what that means, and what to do about it."""

from __future__ import annotations

import logging
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from subquad.runtime import onnx_wire
from subquad.runtime.errors import SubquadError, TargetUnavailableError, UsageError
from subquad.runtime.gpu_kernels import CUDA_ARCHS, RUN_ON_A_GPU, compute_capability
from subquad.runtime.jsonable import json_ready
from subquad.runtime.kernel_tools import missing_kernel_tools
from subquad.runtime.machine import cpu_flags, cpu_model, memory_bytes, usable_cores, versions
from subquad.runtime.session import CPU, PROVIDERS, onnxruntime, open_session

logger = logging.getLogger(__name__)

_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
_VECTOR_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "amx_tile", "asimd", "sve")
_SHORT_NAMES: Mapping[str, str] = {full: short for short, full in PROVIDERS.items()}


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what; also what ``--require`` takes.
        ok: present and working.
        found: version, or what was seen.
        advice: what it means that it is missing or broken, and what to do.
        problem: whether something is wrong, as opposed to merely absent.
    """

    name: str
    ok: bool
    found: str
    advice: str = ""
    problem: bool = False


@dataclass(frozen=True)
class DoctorReport:
    """All checks, most basic first."""

    checks: tuple[Check, ...]

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json_ready(self)
        return result

    def missing(self, names: Sequence[str]) -> list[str]:
        """One sentence for each of ``names`` that does not work here.

        Raises:
            UsageError: no check has this name.
        """
        known = {check.name: check for check in self.checks}
        sentences = []
        for name in names:
            if name not in known:
                raise UsageError(f"Unknown requirement {name!r}; use one of {', '.join(known)}.")
            check = known[name]
            if not check.ok:
                sentences.append(f"{name} is required: {check.found}. {check.advice}".strip())
        return sentences


def examine() -> DoctorReport:
    """Look at everything; nothing is changed."""
    checks = [
        Check("python", True, platform.python_version()),
        Check("system", True, platform.platform()),
        _processor(),
        _memory(),
        *_extras(),
        _conflict(),
        *_providers(),
        _program(
            "compiler",
            ("c++", "g++", "clang++"),
            "Only needed to build compiled kernels. Without it every operator runs as ONNX "
            "functions. Install g++.",
        ),
        _program(
            "nvcc", ("nvcc",), "Only needed to compile CUDA kernels. Install the CUDA toolkit."
        ),
        _tvm(),
        _cpu_kernels(),
        _cuda_kernels(),
    ]
    return DoctorReport(tuple(checks))


def extras() -> dict[str, tuple[str, ...]]:
    """The packages of each extra, from the metadata of the installed subquad."""
    try:
        requirements = metadata.requires("subquad") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", requirement)
        if name and extra:
            found[extra[1]] = (*found.get(extra[1], ()), name[0])
    return found


def _processor() -> Check:
    flags = cpu_flags()
    vector = [name for name in _VECTOR_FLAGS if name in flags]
    text = f"{cpu_model()}, {usable_cores()} usable cores"
    text += f", {' '.join(vector)}" if vector else ""
    slow = platform.machine() in ("x86_64", "AMD64") and bool(flags) and "avx2" not in flags
    advice = "No AVX2: matrix products will be several times slower." if slow else ""
    return Check("processor", True, text, advice)


def _memory() -> Check:
    size = memory_bytes()
    return Check("memory", True, "unknown" if size is None else f"{size / 2**30:.1f} GiB")


def _extras() -> list[Check]:
    uses = {
        "cpu": "Needed to run, validate and bench (or subquad[gpu] instead).",
        "gpu": "Needed for NVIDIA GPUs, instead of subquad[cpu].",
        "text": "Needed for --text and for text data.",
        "convert": "Needed to inspect and convert models.",
        "kernels": "Only needed to build compiled kernels.",
        "tune": "Only needed to tune kernels over RPC or by MetaSchedule.",
    }
    checks = []
    for extra, packages in extras().items():
        if extra not in uses:
            continue
        found = versions(packages)
        absent = [name for name, version in found.items() if version is None]
        advice = f"{uses[extra]} pip install 'subquad[{extra}]'" if absent else ""
        listed = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
        checks.append(Check(extra, not absent, listed, advice))
    return checks


def _conflict() -> Check:
    found = {name: version for name, version in versions(_RUNTIMES).items() if version}
    listed = ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
    if len(found) < 2:
        return Check("one runtime", True, listed)
    return Check(
        "one runtime",
        False,
        listed,
        "Both own the same module, and the last one installed wins silently. Uninstall both, then "
        "install one: pip uninstall onnxruntime onnxruntime-gpu; pip install 'subquad[gpu]'",
        problem=True,
    )


def _providers() -> list[Check]:
    """What ONNX Runtime lists is what was built in; a session tells what starts."""
    try:
        ort = onnxruntime()
    except TargetUnavailableError as error:
        return [Check("cpu provider", False, "no ONNX Runtime", str(error), problem=True)]
    available = ort.get_available_providers()
    checks = []
    for full in available:
        # Sends inputs to a web service; there is nothing here to start.
        if full == "AzureExecutionProvider":
            continue
        name = "cpu provider" if full == CPU else _SHORT_NAMES.get(full, full)
        try:
            open_session(onnx_wire.matmul_model(), folder=Path(), provider=full)
        except SubquadError as error:
            logger.info("%s: %s", full, error)
            checks.append(Check(name, False, "built in, does not start", str(error), problem=True))
        else:
            checks.append(Check(name, True, "a session runs on it"))
    if PROVIDERS["cuda"] not in available:
        advice = "Only needed for NVIDIA GPUs: pip install 'subquad[gpu]' instead of subquad[cpu]."
        checks.append(Check("cuda", False, "not built into this ONNX Runtime", advice))
    return checks


def _program(name: str, candidates: Sequence[str], advice: str) -> Check:
    for candidate in candidates:
        path = shutil.which(candidate)
        if path is None:
            continue
        try:
            done = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            return Check(name, False, f"{candidate} fails: {error}", advice, problem=True)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        # nvcc names itself first and its release last but one.
        release = next((line for line in lines if "release" in line), lines[0] if lines else path)
        return Check(name, True, release.strip())
    return Check(name, False, "not found", advice)


def _tvm() -> Check:
    found = versions(("apache-tvm",))["apache-tvm"]
    advice = "Only needed to build compiled kernels. pip install 'subquad[kernels]'"
    return Check("tvm", found is not None, found or "not installed", "" if found else advice)


def _cpu_kernels() -> Check:
    """Whether conversions here add compiled kernels."""
    missing = missing_kernel_tools()
    if missing:
        advice = "Conversions succeed without them: attentions run as ONNX functions."
        return Check("cpu kernels", False, f"cannot be compiled: {missing}", advice)
    return Check("cpu kernels", True, "can be compiled: convert --kernels cpu")


def _cuda_kernels() -> Check:
    """What `convert --target` can compile here, and what is known of the result."""
    known = ", ".join(f"cuda:{arch}" for arch in CUDA_ARCHS)
    absent = [name for name in ("nvcc", "g++") if shutil.which(name) is None]
    if versions(("apache-tvm",))["apache-tvm"] is None:
        absent.append("apache-tvm")
    try:
        major, minor = compute_capability()
        device = f"this GPU is sm_{major}{minor}"
    except TargetUnavailableError:
        device = "there is no GPU here to run them"
    history = "" if RUN_ON_A_GPU else "; these kernels have never run on a GPU"
    if absent:
        missing = ", ".join(absent)
        return Check(
            "cuda kernels",
            False,
            f"cannot be compiled: {missing} missing",
            f"Only needed for convert --target (one of {known}){history}.",
        )
    return Check("cuda kernels", True, f"{known} can be compiled; {device}{history}")
