"""An ``.onnx`` file of opset 13 to 28 -> the same graph at opset 24."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import version_converter

from subquad.converter.huggingface import find_companions
from subquad.converter.newer_opsets import step_down
from subquad.converter.onnx_checks import custom_domains, external_files, read_proto
from subquad.converter.signature import describe_signature, extended_to
from subquad.converter.simplify import simplify
from subquad.converter.source_hash import hash_files
from subquad.converter.torch_export import IR_VERSION, OPSET, quiet, rename_dimensions
from subquad.converter.traced import TracedModel
from subquad.converter.weights import StoredTensor
from subquad.runtime.errors import SubquadError, UnsupportedModelError
from subquad.runtime.past import PAST
from subquad.runtime.session import translated_errors

# Names exporters make up (s53, unk__0, Identity463_dim_0): they say nothing about equality.
_ANONYMOUS = re.compile(r"s\d+|u\d+|unk__\d+|.*_dim_\d+|\?|-1|")


def trace_onnx(path: Path) -> TracedModel:
    """Read an ``.onnx`` file; weights in external data stay there, others are views of the file.

    The reference is the source graph at its own opset. The model is converted to opset 24 first
    and simplified afterwards: the version converter wants the spelling it knows.

    Raises:
        UsageError: no such file.
        UnsupportedModelError: malformed, hostile, opset out of range, or not convertible.
    """
    proto = read_proto(path)
    files = external_files(proto, path)
    domains = custom_domains(proto)
    if domains:
        _check_runs(path, f"operators of {', '.join(domains)}")
    try:
        reference = ir.from_proto(proto)
    except (ValueError, TypeError, KeyError, AssertionError, RuntimeError) as error:
        raise UnsupportedModelError(f"{path.name} is malformed: {_deepest(error)}.") from error
    _bind_external_data(reference, files)
    # A newer one says who wrote the file, not what is in it: the operators are those of the opset.
    reference.ir_version = min(reference.ir_version or IR_VERSION, IR_VERSION)
    _normalise(reference)
    model = reference.clone()
    _inputs_without_defaults(model)
    _convert_version(model, path.name)
    newer = max(reference.opset_imports.get("", 0), OPSET)
    if newer > OPSET and not domains:
        _check_runs(path, f"opset {newer}")
    with quiet():
        _infer_shapes(model)
        simplify(model)
    _name_dimensions(model, reference)
    _name_past(model, reference)
    model.ir_version = IR_VERSION
    specs = describe_signature(model.graph)
    return TracedModel(
        model=model,
        reference=reference,
        kind="onnx",
        source_name=path.name,
        source_hash=hash_files({path.name: path, **files}),
        inputs=specs[0],
        outputs=specs[1],
        companions=find_companions(path.parent),
    )


def _check_runs(path: Path, what: str) -> None:
    """Operators of other domains and newer opsets pass only if ONNX Runtime itself knows them."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        with translated_errors("ONNX Runtime cannot run it"):
            onnxruntime.InferenceSession(
                str(path), sess_options=options, providers=["CPUExecutionProvider"]
            )
    except SubquadError as error:
        raise UnsupportedModelError(f"{path.name} uses {what}, and {error}") from error


def _bind_external_data(model: ir.Model, files: Mapping[str, Path]) -> None:
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = _bound(tensor, files, name)
        for node in graph:
            for attribute in list(node.attributes.values()):
                if isinstance(attribute.value, ir.ExternalTensor):
                    bound = _bound(attribute.value, files, attribute.value.name)
                    node.attributes[attribute.name] = ir.AttrTensor(attribute.name, bound)


def _bound(tensor: ir.ExternalTensor, files: Mapping[str, Path], name: str) -> ir.TensorProtocol:
    shape = tuple(tensor.shape.numpy())
    stored = StoredTensor(files[str(tensor.location)], tensor.offset or 0, tensor.dtype, shape)
    return stored.to_ir(name)


def _normalise(model: ir.Model) -> None:
    """What both graphs share: no doc strings, constants as (shareable) initializers, sorted."""
    common.ClearMetadataAndDocStringPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=256)(model)
    common.TopologicalSortPass()(model)


def _inputs_without_defaults(model: ir.Model) -> None:
    """An input that has an initializer is a default nobody overrides: a constant from here on."""
    fixed = [value for value in model.graph.inputs if value.is_initializer()]
    for value in fixed:
        model.graph.inputs.remove(value)


def _convert_version(model: ir.Model, name: str) -> None:
    source = model.opset_imports.get("", 0)
    if source > OPSET:
        with quiet():
            _infer_shapes(model)  # what some operators mean depends on the type
        step_down(model, OPSET, name)
    try:
        with quiet():
            version_converter.convert_version(model, OPSET, fallback=True)
    except (ir.passes.PassError, ValueError, TypeError, RuntimeError, LookupError) as error:
        raise UnsupportedModelError(
            f"{name} cannot be converted from opset {source} to {OPSET}: {_deepest(error)}. "
            "Export it again with a newer opset."
        ) from error
    if model.opset_imports.get("") != OPSET:
        raise UnsupportedModelError(
            f"{name} cannot be converted from opset {source} to {OPSET}: an operator has no "
            "conversion. Export it again with a newer opset."
        )


def _infer_shapes(model: ir.Model) -> None:
    """Shapes of inner values, where ONNX can tell; a failure leaves them unknown."""
    common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)


def _name_dimensions(model: ir.Model, reference: ir.Model) -> None:
    """Call the dynamic axis 0 of inputs ``batch`` and axis 1 of sequences ``length``.

    Axes that the source names differently stay different, unless the name is one that exporters
    make up. Axis 1 of a ``decoder_…`` input is ``decoder_length`` unless it is shared.
    """
    renames: dict[str, str] = {}
    taken: dict[str, str] = {}
    sequences = {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL}
    anonymous: list[tuple[int, int, str]] = []
    inputs = [value for value in model.graph.inputs if value.shape is not None]
    for index, value in enumerate(inputs):
        shape = value.shape
        assert shape is not None
        for axis, dim in enumerate(shape):
            if isinstance(dim, int):
                continue
            if axis == 0:
                wanted = "batch"
            elif axis == 1 and (value.dtype in sequences or len(shape) <= 3):
                decoder = (value.name or "").startswith("decoder")
                wanted = "decoder_length" if decoder else "length"
            else:
                continue
            text = dim.value or ""
            if _ANONYMOUS.fullmatch(text):
                anonymous.append((index, axis, wanted))
                if text:
                    renames.setdefault(text, wanted)
            elif text not in renames and taken.setdefault(wanted, text) == text:
                renames[text] = wanted
    for other in (model, reference):
        by_name = {value.name: value for value in other.graph.inputs}
        for index, axis, wanted in anonymous:
            twin = by_name[inputs[index].name]
            assert twin.shape is not None
            dims = list(twin.shape)
            dims[axis] = ir.SymbolicDim(wanted)
            twin.shape = ir.Shape(dims)
        rename_dimensions(other, renames)
    originals = {value.name: value for value in reference.graph.outputs}
    for value in model.graph.outputs:
        original = originals.get(value.name)
        if value.shape is None and original is not None:
            value.shape = original.shape
        # The converter's inference may know more than what the exporter wrote down.
        if original is not None and original.shape is None:
            original.shape = value.shape


def _name_past(model: ir.Model, reference: ir.Model) -> None:
    """Call the tokens of earlier calls ``past``, where inputs of the graph hold them.

    What an exporter calls the sum of these and the new tokens becomes that sum.
    """
    inputs = model.graph.inputs
    pasts = {value: output for value in inputs if (output := extended_to(value)) is not None}
    integers = (ir.DataType.INT64, ir.DataType.INT32)
    tokens = [
        str(value.shape[1])
        for value in inputs
        if value.dtype in integers
        and value.shape is not None
        and len(value.shape) == 2
        and not any(word in (value.name or "") for word in ("mask", "position"))
    ]
    if not pasts or not tokens:
        return
    renames: dict[str, str] = {}
    for value, output in pasts.items():
        assert value.shape is not None
        before, after = str(value.shape[2]), str(output.shape[2]) if output.shape else ""
        if before.isidentifier():
            renames[before] = PAST
        if after.isidentifier() and after != before:
            renames[after] = f"{PAST} + {tokens[0]}"
    for other in (model, reference):
        rename_dimensions(other, renames)


def _deepest(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
