"""A Python ``nn.Module`` -> traced graph."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.converter.signature import describe_signature
from subquad.converter.source_hash import hash_model
from subquad.converter.source_sample import run_source
from subquad.converter.torch_export import export_module
from subquad.converter.traced import TracedModel
from subquad.runtime.errors import UsageError

if TYPE_CHECKING:
    import torch

USER_CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What Python code of the user's raises when something is wrong with it or with its files."""

_CONVENTION = (
    "A factory returns an nn.Module with a method example_inputs(), or (module, example_inputs), "
    "or (module, example_inputs, dynamic_axes), or a subquad.converter.module.ModuleSource. "
    "example_inputs is a dict by forward() argument name, or a tuple in order."
)


@dataclass(frozen=True)
class ModuleSource:
    """A module and what is needed to trace it.

    Attributes:
        module: traced in eval mode; left in the mode it had.
        example_inputs: tensors by ``forward`` argument name, or in its order. Use at least two
            rows and a length that no layer size equals.
        dynamic_axes: per input, axis -> name. Default: axis 0 of every input is ``batch``; axis 1
            of every integer or bool input, and of floats of rank 2 and 3, is ``length``. Axes with
            the same name have the same size.
        name: what messages and the manifest call it.
    """

    module: torch.nn.Module
    example_inputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = field(default=None)
    name: str = ""


def trace_factory(reference: str) -> TracedModel:
    """Trace what a factory returns when called without arguments.

    Args:
        reference: ``"package.module:factory"``, with the current directory importable as with
            ``python -m``, or ``"path/to/file.py:factory"``. This runs the user's code.

    Raises:
        UsageError: no such module or factory, or it does not follow the convention.
    """
    target = load_object(reference)
    try:
        result = target() if callable(target) and not _is_module(target) else target
    except USER_CODE_ERRORS as error:
        raise user_code_error(reference, error) from error
    source = _as_source(result, reference)
    return trace_module(
        ModuleSource(source.module, source.example_inputs, source.dynamic_axes, reference)
    )


def load_object(reference: str) -> Any:
    """What ``"package.module:name"`` or ``"path/to/file.py:name"`` names. This runs user code.

    Raises:
        UsageError: no such module or name, or its import fails.
    """
    module_name, _, attribute = reference.rpartition(":")
    if not module_name or not attribute:
        raise UsageError(f"{reference!r}: expected package.module:name or path/to/file.py:name.")
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        if module_name.endswith(".py"):
            target: Any = _load_file(Path(module_name))
        else:
            target = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
        return target
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{reference}: cannot import {error.name!r}. The current directory and installed "
            "packages are searched."
        ) from error
    except USER_CODE_ERRORS as error:
        raise user_code_error(reference, error) from error
    finally:
        sys.path[:] = before


def user_code_error(what: str, error: Exception) -> UsageError:
    """``error`` of the user's code, with the line that raised it."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    ours = line.filename == __file__ or line.filename.startswith("<")
    where = "" if ours else f" ({line.filename}, line {line.lineno})"
    return UsageError(f"{what}: {type(error).__name__}: {error}{where}.")


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"{path} does not exist.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered first: dataclasses and pickling look the module up while it is executed.
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def trace_module(source: torch.nn.Module | ModuleSource | tuple[Any, ...]) -> TracedModel:
    """Trace a module given through the API; see ``ModuleSource``.

    Raises:
        UsageError: example inputs are missing or do not fit ``forward``.
        UnsupportedModelError: torch cannot trace it.
    """
    source = _as_source(source, type(source).__name__)
    name = source.name or type(source.module).__name__
    inputs = _named_inputs(source, name)
    axes = _dynamic_axes(source, inputs, name)
    module = _in_float32(source.module)
    training = module.training
    module.eval()
    try:
        model = export_module(module, inputs, axes, what=name)
        sample = run_source(module, inputs)
    finally:
        module.train(training)
    specs = describe_signature(model.graph)
    return TracedModel(
        model=model,
        reference=model.clone(),
        kind="module",
        source_name=name,
        source_hash=hash_model(model),
        inputs=specs[0],
        outputs=specs[1],
        sample_inputs=sample.inputs,
        sample_outputs=sample.named(model),
    )


def _in_float32(module: torch.nn.Module) -> torch.nn.Module:
    """``module``, or a float32 copy if it holds half-precision tensors.

    ONNX Runtime's CPU provider lacks many operators in float16 and bfloat16, and a table in half
    precision (rotary phases, say) is promoted by torch at its first use anyway.
    """
    import itertools

    import torch

    half = (torch.float16, torch.bfloat16)
    if any(t.dtype in half for t in itertools.chain(module.parameters(), module.buffers())):
        return copy.deepcopy(module).float()
    return module


def _is_module(value: object) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _as_source(value: Any, name: str) -> ModuleSource:
    if isinstance(value, ModuleSource):
        return value
    if _is_module(value):
        examples = getattr(value, "example_inputs", None)
        if not callable(examples):
            raise UsageError(f"{name}: example inputs are missing. {_CONVENTION}")
        return ModuleSource(value, examples(), name=name)
    if isinstance(value, tuple) and len(value) in (2, 3) and _is_module(value[0]):
        return ModuleSource(*value)
    raise UsageError(f"{name}: got {type(value).__name__}, which is no model. {_CONVENTION}")


def _named_inputs(source: ModuleSource, name: str) -> dict[str, torch.Tensor]:
    import torch

    parameters = inspect.signature(source.module.forward).parameters
    given = source.example_inputs
    if isinstance(given, torch.Tensor):
        given = (given,)
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(parameters))
        if unknown:
            raise UsageError(
                f"{name}: forward() has no argument {unknown[0]!r}; it has {', '.join(parameters)}."
            )
        inputs = {key: given[key] for key in parameters if key in given}
    elif isinstance(given, Sequence) and len(given) <= len(parameters):
        inputs = dict(zip(parameters, given, strict=False))
    else:
        raise UsageError(f"{name}: example inputs do not fit forward(). {_CONVENTION}")
    for key, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name}: example input {key!r} is {type(value).__name__}, expected a tensor. "
                "Bind other arguments in the factory."
            )
        if parameters[key].kind in {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.POSITIONAL_ONLY,
        }:
            raise UsageError(
                f"{name}: forward() takes {key!r} as *args, **kwargs or positional-only, so the "
                "input has no name. Wrap the module."
            )
    missing = [
        key
        for key, parameter in parameters.items()
        if key not in inputs
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    ]
    if missing or not inputs:
        raise UsageError(
            f"{name}: example inputs lack {missing[0] if missing else 'everything'!r}. "
            f"{_CONVENTION}"
        )
    return inputs


def _dynamic_axes(
    source: ModuleSource, inputs: Mapping[str, torch.Tensor], name: str
) -> dict[str, dict[int, str]]:
    if source.dynamic_axes is None:
        return {key: _default_axes(value) for key, value in inputs.items()}
    axes: dict[str, dict[int, str]] = {}
    for key, wanted in source.dynamic_axes.items():
        if key not in inputs:
            raise UsageError(f"{name}: dynamic_axes names {key!r}, which is no example input.")
        for axis, dim in wanted.items():
            if not isinstance(axis, int) or not 0 <= axis < inputs[key].dim():
                raise UsageError(
                    f"{name}: dynamic_axes[{key!r}] names axis {axis!r} of a tensor of rank "
                    f"{inputs[key].dim()}."
                )
            if not isinstance(dim, str) or not dim.isidentifier():
                raise UsageError(
                    f"{name}: dynamic_axes[{key!r}][{axis}] must be a name like 'length', "
                    f"got {dim!r}."
                )
        axes[key] = dict(wanted)
    return axes


def _default_axes(tensor: torch.Tensor) -> dict[int, str]:
    axes = {}
    if tensor.dim() >= 1:
        axes[0] = "batch"
    if tensor.dim() >= 2 and (not tensor.is_floating_point() or tensor.dim() <= 3):
        axes[1] = "length"
    return axes
