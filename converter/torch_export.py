"""nn.Module -> onnx_ir with named dynamic dimensions; parameters become lazy initializers."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from subquad.converter.simplify import simplify
from subquad.runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

OPSET = 24
IR_VERSION = 10


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and log records of torch, transformers and onnxscript.

    They log while modules are imported, so muting their loggers by name would come too late.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def export_module(
    module: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    *,
    find_weight: Callable[[str, int], ir.TensorProtocol | None] = lambda name, address: None,
    what: str,
    bundle: str = "",
) -> ir.Model:
    """Trace ``module`` and name every dynamic dimension.

    Args:
        module: in eval mode.
        inputs: example tensors by ``forward`` argument name.
        dynamic_axes: per input, axis -> dimension name; equal names are one dimension.
        find_weight: ``(name, data_ptr) -> lazy tensor``, or None to keep the tensor from memory.
        what: how error messages call the source.
        bundle: ``forward`` takes all inputs as one dict, under this name; dimension names may be
            sums then.

    Returns:
        Opset-24 model; weight transposes folded lazily, small constants folded.

    Raises:
        UnsupportedModelError: torch cannot trace it, or a dimension cannot vary.
    """
    import torch

    with quiet(), torch.no_grad():
        program = _export(module, inputs, dynamic_axes, what, bundle)
        model = _to_onnx(program, what)
    if bundle:
        _name_inputs(model, inputs)
    _use_stored_weights(model, find_weight)
    _name_outputs(model, program)
    _name_dimensions(model, dynamic_axes, what)
    with quiet():
        simplify(model)
    model.ir_version = IR_VERSION
    # The exporter's bookkeeping holds local names and is of no use later.
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        # Only the module path is wanted: the recogniser names sites by it.
        for key in [k for k in node.metadata_props if k != "pkg.torch.onnx.name_scopes"]:
            del node.metadata_props[key]
        for value in node.outputs:
            value.metadata_props.clear()
    return model


def _export(
    module: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    what: str,
    bundle: str,
) -> ExportedProgram:
    import torch
    from torch._dynamo.exc import UserError
    from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
    from torch.fx.experimental import _config as shape_config

    dynamic = {
        name: {axis: torch.export.Dim.DYNAMIC for axis in dynamic_axes.get(name, {})}
        for name in inputs
    }
    # A sum of dimensions has no name there: which are equal is found while tracing.
    shapes: Any = dynamic
    if not bundle:
        dims = {
            name: torch.export.Dim(name) for axes in dynamic_axes.values() for name in axes.values()
        }
        shapes = {
            name: {axis: dims[dim] for axis, dim in dynamic_axes.get(name, {}).items()}
            for name in inputs
        }

    def run(spec: Any) -> ExportedProgram:
        # backed_size_oblivious: sizes 0 and 1 are not special, so the graph serves batch 1 too.
        with shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            given, spec = dict(inputs), {bundle: spec} if bundle else spec
            arguments: dict[str, Any] = {bundle: given} if bundle else given
            return torch.export.export(module, (), arguments, dynamic_shapes=spec, strict=False)

    failures: list[BaseException] = []
    for attempt in range(3):
        try:
            return run(shapes)
        except UserError as error:
            failures.append(error)
            message = str(error)
            if attempt == 0 and "Suggested fixes" in message:
                try:
                    shapes = refine_dynamic_shapes_from_suggested_fixes(message, shapes)
                except (ValueError, KeyError, AssertionError, AttributeError, TypeError):
                    shapes = dynamic
                if _dynamic_axes_of(shapes) != _dynamic_axes_of(dynamic):
                    # A fix that turns a dimension into a number is no fix.
                    shapes = dynamic
            elif shapes is not dynamic:
                shapes = dynamic
            else:
                break
        except TRACE_ERRORS as error:
            failures.append(error)
            break
    raise UnsupportedModelError(_export_failure(what, failures[0], inputs)) from failures[0]


# What a forward may raise while it runs on symbolic shapes, and what torch.export raises itself.
TRACE_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    ImportError,
)


def _dynamic_axes_of(shapes: Any) -> dict[str, set[int]]:
    return {
        name: {axis for axis, dim in axes.items() if not isinstance(dim, int) and dim is not None}
        for name, axes in shapes.items()
    }


def _export_failure(what: str, error: BaseException, inputs: Mapping[str, torch.Tensor]) -> str:
    tried = ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for name, tensor in inputs.items()
    )
    text = str(error).strip()
    fixes = re.search(r"Suggested fixes:\s*(.+)", text, re.DOTALL)
    if fixes:
        wanted = "; ".join(line.strip() for line in fixes.group(1).splitlines() if line.strip())
        return (
            f"{what}: the model ties or fixes a dimension that must vary. torch.export asks for: "
            f"{wanted}. Traced with {tried}. Declare such axes static in dynamic_axes, or remove "
            "the dependence on their size from forward()."
        )
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return (
        f"{what}: torch.export cannot trace the model ({type(error).__name__}: {first.strip()}). "
        f"Traced with {tried}. The usual causes are Python branches on tensor values and "
        "data-dependent shapes in forward()."
    )


def _to_onnx(program: ExportedProgram, what: str) -> ir.Model:
    import torch
    from torch.onnx.errors import OnnxExporterError

    try:
        result = torch.onnx.export(
            program, (), dynamo=True, opset_version=OPSET, verbose=False, optimize=False
        )
    except OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise UnsupportedModelError(
            f"{what}: an operation has no ONNX form ({type(cause).__name__}: {first})."
        ) from error
    assert result is not None
    model: ir.Model = result.model
    if model.opset_imports.get("") != OPSET:
        raise UnsupportedModelError(
            f"{what}: the exporter stopped at opset {model.opset_imports.get('')}, "
            f"expected {OPSET}."
        )
    return model


def _use_stored_weights(
    model: ir.Model, find_weight: Callable[[str, int], ir.TensorProtocol | None]
) -> None:
    from torch.onnx._internal.exporter._core import TorchTensor

    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None, name
        # By address: of tied parameters, the exporter keeps either name.
        address = tensor.raw.data_ptr() if isinstance(tensor, TorchTensor) else 0
        stored = find_weight(name, address)
        if stored is not None:
            assert stored.shape == tensor.shape and stored.dtype == tensor.dtype, name
            value.const_value = stored
        else:
            # NumPy view of the parameter; frees us from torch objects later on.
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def _name_inputs(model: ir.Model, inputs: Mapping[str, torch.Tensor]) -> None:
    """Name inputs after the keys of the dict that ``forward`` takes."""
    import torch.utils._pytree as pytree

    wanted = pytree.tree_leaves({name: name for name in inputs})
    assert len(wanted) == len(model.graph.inputs)
    for value, name in zip(model.graph.inputs, wanted, strict=True):
        _free_name(model, name, value)
        value.name = name


def _free_name(model: ir.Model, wanted: str, but: ir.Value) -> None:
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name == wanted and value is not but:
                value.name = f"{wanted}_inner"


def _name_outputs(model: ir.Model, program: ExportedProgram) -> None:
    """Name outputs after the keys of the module's result (``logits``, ``last_hidden_state``)."""
    import torch.utils._pytree as pytree

    spec = program.call_spec.out_spec
    if spec is None:
        return
    leaves = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    names: dict[int, str] = {}

    def walk(item: Any, prefix: str) -> None:
        if isinstance(item, int):
            names[item] = prefix or "output"
        elif isinstance(item, Mapping):
            for key, child in item.items():
                walk(child, f"{prefix}_{key}" if prefix else str(key))
        elif isinstance(item, (tuple, list)):
            fields = getattr(item, "_fields", range(len(item)))
            for key, child in zip(fields, item, strict=True):
                stem = str(key) if isinstance(key, str) else f"output_{key}"
                walk(child, f"{prefix}_{key}" if prefix else stem)

    walk(leaves, "")
    tensors = [
        index
        for index, item in enumerate(program.graph_signature.user_outputs)
        if isinstance(item, str)
    ]
    if len(tensors) != len(model.graph.outputs):
        return
    taken = {value.name for value in model.graph.inputs} | set(model.graph.initializers)
    taken |= {value.name for node in model.graph.all_nodes() for value in node.outputs}
    renamed: set[int] = set()
    for index, value in zip(tensors, model.graph.outputs, strict=True):
        wanted = names.get(index)
        # A value returned twice keeps its first name; an input returned as it is keeps its own.
        if wanted is None or id(value) in renamed or value.is_graph_input():
            continue
        renamed.add(id(value))
        if wanted in taken:
            _free_name(model, wanted, value)
        value.name = wanted


def _name_dimensions(
    model: ir.Model, dynamic_axes: Mapping[str, Mapping[int, str]], what: str
) -> None:
    """Replace the exporter's symbols (``s53``) by the dimension names, everywhere."""
    symbols: dict[str, str] = {}
    for value in model.graph.inputs:
        for axis, name in dynamic_axes.get(value.name or "", {}).items():
            dim = value.shape[axis] if value.shape is not None else None
            if isinstance(dim, int):
                raise UnsupportedModelError(
                    f"{what}: dimension {name!r} (axis {axis} of {value.name!r}) came out fixed "
                    f"at {dim}. Something in forward() depends on its size."
                )
            if dim is not None and dim.value is not None:
                symbols.setdefault(dim.value, name)
    rename_dimensions(model, symbols)
    # A sum may be written in either order.
    sums = [n for axes in dynamic_axes.values() for n in axes.values() if " + " in n]
    rename_dimensions(model, {" + ".join(reversed(name.split(" + "))): name for name in sums})


def rename_dimensions(model: ir.Model, symbols: Mapping[str, str]) -> None:
    """Rename symbolic dimensions of every value; expressions have their symbols renamed."""
    word = re.compile(r"[A-Za-z_]\w*")

    def renamed(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        if isinstance(dim, int) or dim.value is None:
            return dim
        whole = symbols.get(dim.value)
        if whole is not None:
            return ir.SymbolicDim(whole)
        text = word.sub(lambda match: symbols.get(match[0], match[0]), dim.value)
        return dim if text == dim.value else ir.SymbolicDim(text)

    for graph in model.graphs():
        values = [*graph.inputs, *graph.outputs]
        values += [output for node in graph for output in node.outputs]
        for value in values:
            if value.shape is not None:
                value.shape = ir.Shape([renamed(dim) for dim in value.shape])
