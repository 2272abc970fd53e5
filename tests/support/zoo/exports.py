"""Exports of the zoo: an ``.onnx`` file and what the torch model says, written once and kept.

    python -m zoo.exports FAMILY:EXPORTER...     # the child process that makes them

Files lie in ``$SUBQUAD_CACHE/zoo``, else in a temporary folder. An exporter that fails, crashes or
does not end is remembered as such.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zoo import families
from zoo.families import FAMILIES, INPUTS, SPELLINGS, Spelling

if TYPE_CHECKING:
    import torch

Arrays = dict[str, NDArray[Any]]
# Lengths at which an export is run: one, fewer and more than it was traced with.
SAMPLE_LENGTHS = (3, 19, 70)
TRACE_LENGTH = 24
# Raise it when the code below makes other files of the same family.
_RECIPE = 1
# Processor time for one export; the slowest takes a tenth of it.
_MAX_SECONDS = 400
# What a child prints once it can work.
_READY = "ready"


@dataclass(frozen=True)
class Exporter:
    """A way to make an ``.onnx`` file: exporter (dynamo or TorchScript), opset, spelling."""

    dynamo: bool
    opset: int
    spelling: Spelling

    @property
    def name(self) -> str:
        return f"{'dynamo' if self.dynamo else 'torchscript'}{self.opset}-{self.spelling}"


EXPORTERS = {
    e.name: e
    for e in (
        Exporter(dynamo, opset, spelling)
        for dynamo, opset in (
            (True, 24),
            (True, 20),
            (True, 18),
            (False, 17),
            (False, 14),
            (False, 13),
        )
        for spelling in SPELLINGS
    )
}


class ExportError(RuntimeError):
    """The exporter failed: there is no file to recognise anything in."""


@dataclass(frozen=True)
class Export:
    """An exported model.

    Attributes:
        path: the ``.onnx`` file.
        samples: inputs, and the first output of the torch model in eager mode.
    """

    path: Path
    samples: list[tuple[Arrays, NDArray[np.float32]]]


def cache_folder() -> Path:
    root = os.environ.get("SUBQUAD_CACHE") or os.path.join(tempfile.gettempdir(), "subquad")
    return Path(root) / "zoo"


def export(family: str, exporter: str) -> Export:
    """The export from the cache, or made now in a process of its own.

    Raises:
        ExportError: torch cannot export it that way; remembered too.
    """
    path, failure = _files(family, exporter)
    if not path.exists() and not failure.exists():
        make_exports([(family, exporter)])
    if failure.exists():
        raise ExportError(failure.read_text("utf-8"))
    arrays = np.load(path.with_suffix(".npz"))
    samples = []
    for number in range(int(arrays["count"])):
        prefix = f"{number}/"
        found = {k.removeprefix(prefix): arrays[k] for k in arrays.files if k.startswith(prefix)}
        samples.append((found, found.pop("output")))
    return Export(path, samples)


def exporters_of(family: str) -> list[str]:
    return [n for n, e in EXPORTERS.items() if e.spelling in FAMILIES[family].spellings]


def make_exports(wanted: Sequence[tuple[str, str]]) -> None:
    """Make what is not in the cache; torch is imported in one child process for all.

    A child that dies takes one export with it: the others go on in another child.
    """
    cache_folder().mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    while missing := [w for w in wanted if not any(f.exists() for f in _files(*w))]:
        names = [":".join(w) for w in missing]
        child = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "zoo.exports", *names],
            env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode == 0:
            return
        lines = ["?", *(line for line in child.stderr.splitlines() if line.strip())]
        if _READY not in child.stdout.splitlines():
            raise RuntimeError(f"no export can be made: {lines[-1]}")
        # They are made in order: the first that is not there is the one it died of.
        path, failure = next(
            files for files in (_files(*w) for w in missing) if not any(f.exists() for f in files)
        )
        reason = lines[-1] if child.returncode > 0 else f"signal {-child.returncode}"
        failure.write_text(f"the exporter ends with {reason}"[:300], "utf-8")


def key_of(family: str, exporter: str) -> str:
    """Names an export by all that it depends on."""
    digest = hashlib.sha256(f"{_RECIPE} {FAMILIES[family]}".encode())
    for package in ("torch", "transformers", "onnxscript", "onnx"):
        digest.update(version(package).encode())
    return f"{family}_{exporter}_{digest.hexdigest()[:10]}"


def _files(family: str, exporter: str) -> tuple[Path, Path]:
    """The model, or the text of the failure."""
    stem = key_of(family, exporter)
    return cache_folder() / f"{stem}.onnx", cache_folder() / f"{stem}.failed"


# --- in the child ----------------------------------------------------------------------------


def example(family: str, rng: np.random.Generator, batch: int, length: int) -> Arrays:
    """Random inputs; paddings in turn: none, right, left, holes."""
    sizes = {"batch": batch, "length": length, "decoder_length": length // 2 + 1}
    sizes["samples"] = 1600 + 20 * length
    arrays: Arrays = {}
    for name, (dims, holds) in INPUTS[FAMILIES[family].inputs].items():
        shape = [sizes[d] if d in sizes else int(d) for d in dims.split()]
        if holds == "tokens":
            arrays[name] = rng.integers(3, 250, shape)
        elif holds == "float":
            arrays[name] = rng.standard_normal(shape).astype(np.float32)
        else:
            real = _padded(rng, *shape)
            arrays[name] = ~real if holds == "hidden" else real.astype(np.int64)
    if FAMILIES[family].inputs == "both":
        # CLIP reads the sentence at its largest token, which must be a real one.
        last = length - 1 - arrays["attention_mask"][:, ::-1].argmax(axis=1)
        arrays["input_ids"][np.arange(batch), last] = 255
    return arrays


def _padded(rng: np.random.Generator, batch: int, length: int) -> NDArray[np.bool_]:
    real = np.ones((batch, length), bool)
    for row in range(batch):
        if row % 4 == 1:
            real[row, length * 2 // 3 + 1 :] = False
        elif row % 4 == 2:
            real[row, : length // 3] = False
        elif row % 4 == 3:
            real[row] = rng.random(length) < 0.7
            real[row, 0] = True
    return real


def _wrapped(module: torch.nn.Module, names: list[str]) -> torch.nn.Module:
    """Positional inputs, first output only: what people write around a model to export it."""
    from torch import Tensor, nn

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *arguments: Tensor) -> Tensor:
            result = self.model(**dict(zip(names, arguments, strict=True)))
            if isinstance(result, Tensor):
                return result
            first: Tensor = result[0]
            return first

    return Wrapper().eval()


def write_export(family: str, exporter_name: str, path: Path) -> None:
    """Export one model and store samples of its eager outputs beside it."""
    import torch

    torch.set_num_threads(1)
    exporter = EXPORTERS[exporter_name]
    with torch.no_grad():
        if exporter.dynamo:
            _export_dynamo(family, exporter, path)
        else:
            module, given = _module(family, exporter.spelling), _traced_with(family)
            torch.onnx.export(
                module,
                tuple(given.values()),
                str(path.with_suffix(".part")),
                input_names=list(given),
                output_names=["output"],
                dynamic_axes=_axes(family),
                opset_version=exporter.opset,
                dynamo=False,
            )
        arrays = _samples(family)
    np.savez(path.with_suffix(".npz"), **arrays)
    path.with_suffix(".part").replace(path)


def _module(family: str, spelling: Spelling) -> torch.nn.Module:
    return _wrapped(families.build(family, spelling), list(INPUTS[FAMILIES[family].inputs]))


def _traced_with(family: str) -> dict[str, torch.Tensor]:
    import torch

    arrays = example(family, np.random.default_rng(0), 2, TRACE_LENGTH)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _axes(family: str) -> dict[str, dict[int, str]]:
    """Inputs and their dynamic axes."""
    return {
        name: {i: d for i, d in enumerate(dims.split()) if not d.isdigit()}
        for name, (dims, _) in INPUTS[FAMILIES[family].inputs].items()
    }


def _export_dynamo(family: str, exporter: Exporter, path: Path) -> None:
    import torch

    given = _traced_with(family)
    # Where there is no capture, torch.onnx has more ways to try.
    module = _captured(family, exporter.spelling) or _module(family, exporter.spelling)
    program = torch.onnx.export(
        module,
        tuple(given.values()),
        input_names=list(given),
        output_names=["output"],
        dynamic_shapes=_dynamic(family),
        opset_version=exporter.opset,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(str(path.with_suffix(".part")), external_data=False)


@lru_cache(maxsize=1)
def _captured(family: str, spelling: Spelling) -> torch.export.ExportedProgram | None:
    """The first step of torch.onnx's exporter, done once for all opsets."""
    import torch
    from torch.fx.experimental import _config

    module, given = _module(family, spelling), tuple(_traced_with(family).values())
    # As torch.onnx does: sizes may be 1 where the example has more.
    with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        try:
            return torch.export.export(module, given, dynamic_shapes=_dynamic(family), strict=False)
        except _FAILURES:
            return None


def _dynamic(family: str) -> Any:
    """Axes as torch.export wants them, of a function of ``*arguments``: those of one tuple."""
    import torch

    axes = _axes(family).values()
    return (tuple(dict.fromkeys(names, torch.export.Dim.DYNAMIC) for names in axes),)


@lru_cache(maxsize=1)
def _samples(family: str) -> Mapping[str, Any]:
    """Inputs, and outputs of the model in eager mode."""
    import torch

    eager: Spelling = "eager" if "eager" in FAMILIES[family].spellings else "sdpa"
    module = _module(family, eager)
    arrays: dict[str, Any] = {"count": len(SAMPLE_LENGTHS)}
    for number, length in enumerate(SAMPLE_LENGTHS):
        given = example(family, np.random.default_rng(length), 4, length)
        output = module(*(torch.from_numpy(a) for a in given.values()))
        arrays |= {f"{number}/{name}": array for name, array in given.items()}
        arrays[f"{number}/output"] = output.numpy()
    return arrays


# What torch's exporters raise on a model they cannot export.
_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    NotImplementedError,
)


def _main(wanted: Sequence[str]) -> None:
    import torch  # noqa: F401
    import transformers  # noqa: F401

    print(_READY, flush=True)
    for family, exporter in (text.split(":") for text in wanted):
        path, failure = _files(family, exporter)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + _MAX_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            write_export(family, exporter, path)
        except _FAILURES as error:
            text = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # torch colours its messages
            lines = [line for line in text.splitlines() if line.strip()] or ["?"]
            failure.write_text(f"{type(error).__name__}: {lines[0]}"[:300], "utf-8")


if __name__ == "__main__":
    _main(sys.argv[1:])
