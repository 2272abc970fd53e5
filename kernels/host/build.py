"""Compile the kernels of an artifact and link them into custom-op libraries, one per target.

TVM runs in a child process (``compile_child.py``): a compiler that crashes or hangs costs the
kernels concerned, never the conversion. Objects and libraries are cached by a hash of everything
that goes into them; equal inputs give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from subquad.kernels.gpu import GpuTarget
from subquad.kernels.host.table import library_source
from subquad.kernels.host.targets import host_targets
from subquad.kernels.kernel import (
    CPU_TEMPLATES,
    CpuTarget,
    kernel_symbol,
    load_template,
)
from subquad.kernels.operator import OperatorVariant
from subquad.runtime.errors import Rejection
from subquad.runtime.kernel_tools import TVM_SERIES, compiler, missing_kernel_tools
from subquad.runtime.machine import available_bytes, usable_cores

logger = logging.getLogger(__name__)

LIBRARY_NAME = "libsubquad_kernels.so"
KERNEL_SECONDS = 300.0
"""A kernel that takes longer to compile is given up."""
COMPILER_BYTES = 640 * 2**20
"""Memory of one compiler process: 510 MiB were seen, LLVM's libraries counted in each."""

_HERE = Path(__file__).parent
_CFLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti")
# No build id, no symbols, no paths: equal inputs, equal bytes. `nodelete`: threads of the pool may
# still be in it when the last session closes. `defs`: a kernel that needs more than the host gives
# is an error here and not at load.
_LDFLAGS = (
    "-shared",
    "-s",
    "-Wl,--build-id=none",
    "-Wl,-z,defs",
    "-Wl,-z,nodelete",
    "-Wl,--as-needed",
    "-static-libgcc",
    "-lm",
)
_EXPORTS = "{ global: RegisterCustomOps; local: *; };\n"

VariantKey = tuple[str, str]
"""Operator and overload."""

ParamsOf = Callable[[OperatorVariant, CpuTarget], Mapping[str, int]]
"""Tuning parameters of a kernel; those not named take the template's defaults."""


def default_params(variant: OperatorVariant, target: CpuTarget) -> Mapping[str, int]:
    """None: the template's defaults."""
    return {}


@dataclass(frozen=True)
class Library:
    """One built library; the file lies in the cache."""

    target: CpuTarget
    path: Path


@dataclass(frozen=True)
class KernelBuild:
    """What was built.

    Attributes:
        libraries: best target last; every one has every kernel of ``served``. Empty: none.
        served: variants with a kernel -> the template that made it.
        declined: variants without, each with its reason.
    """

    libraries: tuple[Library, ...] = ()
    served: Mapping[VariantKey, str] = field(default_factory=dict)
    declined: Mapping[VariantKey, Rejection] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """One kernel, compiled for tuning: a library with nothing else in it."""

    library: Path


@dataclass(frozen=True)
class Job:
    """One kernel for one target; ``object`` is the file that says it is done."""

    variant: OperatorVariant
    template: str
    target: CpuTarget | GpuTarget
    params: Mapping[str, int]
    object: Path

    @property
    def key(self) -> VariantKey:
        return variant_key(self.variant)

    def to_json(self, error: Path) -> dict[str, Any]:
        return {
            "variant": class_name(self.variant),
            "fields": fields_of(self.variant),
            "template": self.template,
            "target": asdict(self.target),
            "params": dict(self.params),
            "object": str(self.object),
            "error": str(error),
        }


@dataclass(frozen=True)
class _Child:
    """What a child process did.

    Attributes:
        started: whether it came to its first kernel.
        errors: what it says of each.
        end: how it ended.
    """

    started: bool
    errors: list[str | None]
    end: str


class _LinkError(Exception):
    """The C++ compiler or linker failed; the message has its words."""


def variant_key(variant: OperatorVariant) -> VariantKey:
    return variant.op_type, variant.overload


def build_kernels(
    variants: Sequence[OperatorVariant],
    *,
    targets: Sequence[CpuTarget] | None = None,
    templates: Mapping[str, str] = CPU_TEMPLATES,
    params: ParamsOf = default_params,
    kernel_seconds: float = KERNEL_SECONDS,
    workers: int | None = None,
) -> KernelBuild:
    """Compile what can be compiled; never raises for what cannot.

    Args:
        variants: of the artifact's nodes; duplicates are built once.
        targets: default: the portable one, and this machine's own where it can do more.
        templates: operator -> ``module:attribute``.
        params: tuning parameters of each variant on each target.
        kernel_seconds: time limit of one compilation.
        workers: compilers that run at once; default: ``compilers_at_once``. What is built does not
            depend on it.
    """
    unique = {variant_key(variant): variant for variant in variants}
    missing = missing_tools()
    if missing is not None:
        return KernelBuild(declined={key: missing for key in unique})
    targets = host_targets() if targets is None else targets
    cache = cache_folder()
    declined: dict[VariantKey, Rejection] = {}
    jobs: list[Job] = []
    for key, variant in unique.items():
        template = load_template(variant.op_type, templates)
        refusal = template if isinstance(template, Rejection) else template.supports(variant)
        if refusal is not None:
            declined[key] = refusal
            continue
        place = templates[variant.op_type]
        jobs += [_job(variant, place, t, params(variant, t), cache) for t in targets]
    workers = compilers_at_once() if workers is None else workers
    wanted = [job for job in jobs if not job.object.exists()]
    failed = compile_jobs(wanted, kernel_seconds, workers=workers)
    declined |= {job.key: failed[job.object] for job in jobs if job.object in failed}
    good = [job for job in jobs if job.key not in declined]
    if not good:
        return KernelBuild(declined=declined)
    try:
        libraries = tuple(
            Library(target, _link([job for job in good if job.target == target], target, cache))
            for target in targets
        )
    except _LinkError as error:
        refusal = Rejection(f"the kernel library could not be linked: {error}")
        return KernelBuild(declined=declined | {job.key: refusal for job in good})
    return KernelBuild(libraries, {job.key: job.template for job in good}, declined)


def build_candidates(
    variant: OperatorVariant,
    target: CpuTarget,
    params: Sequence[Mapping[str, int]],
    *,
    templates: Mapping[str, str] = CPU_TEMPLATES,
    hosted: bool = True,
    kernel_seconds: float = KERNEL_SECONDS,
    seconds: float = float("inf"),
    workers: int = 1,
) -> list[Candidate | Rejection]:
    """Compile one variant with several tuning parameters, each into a library of its own.

    Args:
        variant: one that its template supports.
        target: to compile for.
        params: of each candidate.
        templates: operator -> ``module:attribute``.
        hosted: whether the libraries are for ONNX Runtime; else the bare kernels, for a TVM
            runtime elsewhere.
        kernel_seconds: time limit of one compilation.
        seconds: time limit of all compilations; what is not done by then is rejected.
        workers: compilers that run at once.

    Returns:
        For each of ``params`` the candidate, or why there is none.
    """
    missing = missing_tools()
    if missing is not None:
        return [missing] * len(params)
    cache, place = cache_folder(), templates[variant.op_type]
    jobs = [_job(variant, place, target, each, cache) for each in params]
    wanted = {job.object: job for job in jobs if not job.object.exists()}
    deadline = time.monotonic() + seconds
    failed = compile_jobs(list(wanted.values()), kernel_seconds, deadline, workers)
    found: list[Candidate | Rejection] = []
    for job in jobs:
        if job.object in failed:
            found.append(failed[job.object])
            continue
        try:
            found.append(Candidate(_link([job], target, cache) if hosted else _link_bare(job)))
        except _LinkError as error:
            found.append(Rejection(f"the kernel library could not be linked: {error}"))
    return found


def compilers_at_once() -> int:
    """One per usable core, but no more than there is free memory for."""
    memory = available_bytes()
    room = usable_cores() if memory is None else memory // COMPILER_BYTES
    return max(1, min(usable_cores(), room))


def missing_tools() -> Rejection | None:
    """Why no kernel can be built on this machine; ``None`` if all tools are there."""
    missing = missing_kernel_tools()
    return Rejection(missing) if missing else None


def cache_folder(name: str = "kernels") -> Path:
    """In ``$SUBQUAD_CACHE`` or the user's cache folder; a temporary one if not writable."""
    if override := os.environ.get("SUBQUAD_CACHE"):
        root = Path(override)
    elif base := os.environ.get("XDG_CACHE_HOME"):
        root = Path(base) / "subquad"
    else:
        root = Path.home() / ".cache" / "subquad"
    folder = root.absolute() / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        logger.warning("no cache: %s cannot be written: %s", folder, error.strerror)
        return Path(tempfile.mkdtemp(prefix="subquad-kernels-"))


def fields_of(variant: OperatorVariant) -> dict[str, Any]:
    # Variants are dataclasses by contract, which a Protocol cannot say.
    return asdict(variant)  # type: ignore[call-overload, no-any-return]


def class_name(variant: OperatorVariant) -> str:
    """``module:class``, by which the child process makes the variant again."""
    return f"{type(variant).__module__}:{type(variant).__qualname__}"


def _job(
    variant: OperatorVariant,
    template: str,
    target: CpuTarget,
    params: Mapping[str, int],
    cache: Path,
) -> Job:
    name = object_key(variant, template, target, params)
    return Job(variant, template, target, params, cache / f"{name}.o")


def object_key(
    variant: OperatorVariant,
    template: str,
    target: CpuTarget | GpuTarget,
    params: Mapping[str, int],
    *tools: str,
) -> str:
    """Hash of all that a kernel object depends on; ``tools``: versions of further compilers."""
    facts = {
        "variant": class_name(variant),
        "fields": fields_of(variant),
        "symbol": kernel_symbol(variant),
        "template": template,
        "sources": _source_hash(template),
        "target": asdict(target),
        "params": dict(params),
        "tvm": {package: version(package) for package in TVM_SERIES},
        "tools": tools,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def installed_version(package: str) -> str:
    """Version of ``package``; "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def template_version(template: str) -> str:
    """Hash of what decides how fast the kernels of a template are: for ours, its operator's
    folder and ``kernels/templates``; for others as ``_source_hash``."""
    spec = find_spec(template.partition(":")[0])
    assert spec is not None and spec.origin is not None, "checked by load_template"
    own, kernels = Path(spec.origin), _HERE.parent
    if not own.is_relative_to(kernels):
        return _source_hash(template)[:16]
    return _hash_files([*own.parent.glob("*.py"), *(kernels / "templates").glob("*.py")])[:16]


def _source_hash(template: str) -> str:
    """Of the template and what it may take helpers from.

    For our own that is the package ``kernels``, for one of another package its folder, for a
    single module the module.
    """
    module = template.partition(":")[0]
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, "checked by load_template"
    own, kernels = Path(spec.origin), _HERE.parent
    if own.is_relative_to(kernels):
        # What searches for parameters is no part of what they are put into.
        tuning = kernels / "tuning"
        return _hash_files([p for p in kernels.rglob("*.py") if not p.is_relative_to(tuning)])
    return _hash_files(own.parent.rglob("*.py") if "." in module else [own])


def _hash_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compile_jobs(
    jobs: Sequence[Job],
    kernel_seconds: float,
    deadline: float = float("inf"),
    workers: int = 1,
) -> dict[Path, Rejection]:
    """Make the objects of ``jobs``, in ``workers`` processes at once; returns those that failed,
    by object.

    Nothing goes on after ``deadline``, in the time of ``time.monotonic``.
    """
    failed: dict[Path, Rejection] = {}
    left = list(jobs)
    while left:
        if time.monotonic() >= deadline:
            failed |= {job.object: _refusal(job, "no time was left") for job in left}
            break
        parts = [left[first::workers] for first in range(min(workers, len(left)))]
        with ExitStack() as stack:
            waits = [stack.enter_context(_running(part)) for part in parts]
            children = [wait(kernel_seconds, deadline) for wait in waits]
        left = []
        for part, child in zip(parts, children, strict=True):
            undone = []
            for job, error in zip(part, child.errors, strict=True):
                if error is not None:
                    failed[job.object] = _refusal(job, error)
                elif not job.object.exists():
                    undone.append(job)
            # The child did one after the other, so the first that it left undone ended it; if it
            # did not even come to the first, the others would fare no better.
            culprits = undone[:1] if child.started else undone
            failed |= {job.object: _refusal(job, child.end) for job in culprits}
            left += undone[len(culprits) :]
    return failed


def _refusal(job: Job, reason: str) -> Rejection:
    return Rejection(f"the kernel for {job.target.name} was not compiled: {reason}")


@contextmanager
def _running(jobs: Sequence[Job]) -> Iterator[Callable[[float, float], _Child]]:
    """One child process over ``jobs``, killed at the end; gives what waits for it, for
    ``kernel_seconds`` per kernel and until ``deadline``."""
    with tempfile.TemporaryDirectory(prefix="subquad-kernels-") as folder:
        task = Path(folder, "task.json")
        errors = [Path(folder, f"{number}.error") for number in range(len(jobs))]
        started = Path(folder, "started")
        content = {
            "started": str(started),
            "kernels": [job.to_json(error) for job, error in zip(jobs, errors, strict=True)],
        }
        task.write_text(json.dumps(content), "utf-8")
        # -P: the working directory must not shadow a module.
        command = [sys.executable, "-P", "-m", "subquad.kernels.host.compile_child", str(task)]
        with Path(folder, "output").open("w+b") as output:
            # Templates come from where this process sees them.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )

            def stop() -> None:
                if child.poll() is None:
                    child.kill()
                    child.wait()

            def wait(kernel_seconds: float, deadline: float) -> _Child:
                objects = [job.object for job in jobs]
                in_time = _wait(child, objects + errors, kernel_seconds, deadline)
                stop()
                output.seek(0)
                end = _ending(child.returncode, output.read().decode("utf-8", "replace"))
                return _Child(
                    started.exists(),
                    [path.read_text("utf-8") if path.exists() else None for path in errors],
                    end if in_time else _too_long(kernel_seconds, deadline),
                )

            try:
                yield wait
            finally:
                stop()


def _wait(
    child: subprocess.Popen[bytes],
    results: Sequence[Path],
    kernel_seconds: float,
    deadline: float,
) -> bool:
    """Wait while the child leaves results; false if none came for so long, or time is up."""
    finished = 0
    while True:
        left = deadline - time.monotonic()
        try:
            child.wait(max(0.0, min(kernel_seconds, left)))
            return True
        except subprocess.TimeoutExpired:
            now = sum(path.exists() for path in results)
            if now == finished or left < kernel_seconds:
                return False
            finished = now


def _too_long(kernel_seconds: float, deadline: float) -> str:
    if time.monotonic() >= deadline:
        return "no time was left"
    return f"it took more than {kernel_seconds:g} s"


def _ending(code: int, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = f": {lines[-1][:300]}" if lines else ""
    if code < 0:
        return f"the compiler process was killed by signal {-code}{last}"
    return f"the compiler process ended with status {code}{last}"


def _link(jobs: Sequence[Job], target: CpuTarget, cache: Path) -> Path:
    """The library of all ``jobs``, from the cache or linked now."""
    program = compiler()
    assert program is not None, "checked by missing_tools"
    jobs = sorted(jobs, key=lambda job: job.key)
    source = library_source([job.variant for job in jobs], target)
    own = {path.name: path.read_bytes() for path in sorted(_HERE.glob("*.cc"))}
    own |= {path.name: path.read_bytes() for path in sorted(_HERE.glob("*.h"))}
    digest = hashlib.sha256(run_tool([program, "--version"], Path()).encode())
    facts = [*_CFLAGS, *_LDFLAGS, _EXPORTS, target.name, source, program]
    for part in [text.encode() for text in facts] + list(own.values()):
        digest.update(hashlib.sha256(part).digest())
    for job in jobs:
        digest.update(hashlib.sha256(job.object.read_bytes()).digest())
    library = cache / f"{digest.hexdigest()}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(prefix="subquad-kernels-") as name:
        folder = Path(name)
        # Relative names, so that no path of this machine gets into the library.
        for file, content in own.items():
            (folder / file).write_bytes(content)
        (folder / "kernels.cc").write_text(source, "utf-8")
        (folder / "exports.map").write_text(_EXPORTS, "utf-8")
        objects = [f"kernel_{index}.o" for index in range(len(jobs))]
        for job, file in zip(jobs, objects, strict=True):
            shutil.copyfile(job.object, folder / file)
        sources = ["shim.cc", "kernels.cc"]
        export = "-Wl,--version-script=exports.map"
        command = [program, *_CFLAGS, *sources, *objects, export, *_LDFLAGS, "-o", LIBRARY_NAME]
        run_tool(command, folder)
        temporary = cache / f"{library.stem}.{os.getpid()}.part"
        shutil.copyfile(folder / LIBRARY_NAME, temporary)
        os.replace(temporary, library)
    return library


def _link_bare(job: Job) -> Path:
    """A library of the kernel alone; what it calls is for the TVM runtime that loads it."""
    program = compiler()
    assert program is not None, "checked by missing_tools"
    library = job.object.with_suffix(".so")
    if not library.exists():
        temporary = library.with_name(f"{library.stem}.{os.getpid()}.part")
        flags = ["-shared", "-s", "-Wl,--build-id=none"]
        run_tool([program, *flags, str(job.object), "-lm", "-o", str(temporary)], job.object.parent)
        os.replace(temporary, library)
    return library


def run_tool(command: Sequence[str], folder: Path) -> str:
    """Output of a compiler command, in English whatever the locale."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=KERNEL_SECONDS,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _LinkError(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        wanted = [line for line in lines if "error" in line or "undefined" in line] or lines
        raise _LinkError("; ".join(wanted[:3]) or f"{command[0]} ended with {done.returncode}")
    return done.stdout
