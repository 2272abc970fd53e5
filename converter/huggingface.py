"""A Hugging Face folder (config.json + safetensors) -> traced graph with lazy weights."""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from subquad.converter.signature import describe_signature
from subquad.converter.source_hash import hash_files
from subquad.converter.source_sample import SourceSample, run_source, run_source_on_random
from subquad.converter.torch_export import export_module, quiet
from subquad.converter.traced import TracedModel
from subquad.converter.weights import INDEX_NAME, StoredTensor, is_lazy, open_checkpoint
from subquad.runtime.errors import UnsupportedModelError, UsageError
from subquad.runtime.manifest import InputSpec, OutputSpec
from subquad.runtime.past import PAST

if TYPE_CHECKING:
    import torch

    from subquad.converter.cached_decoder import CachedDecoder

CONFIG_NAME = "config.json"

COMPANION_PATTERNS = (
    "tokenizer*.json",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "*.model",
)

# What traces: two rows (so that batch is not taken for 1) and a length no layer size equals.
_BATCH, _LENGTH, _TARGET_LENGTH = 2, 23, 11

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Task:
    """One graph to trace of a loaded model.

    Attributes:
        module, inputs, axes, bundle: as of ``export_module``.
        sample: what the module computes itself on a small input.
        cached: whether every past of it must be carried on.
        limit: longest sequence, where known.
    """

    module: Any
    inputs: dict[str, torch.Tensor]
    axes: dict[str, dict[int, str]]
    sample: SourceSample
    limit: int | None
    bundle: str = ""
    cached: bool = False


def trace_huggingface(folder: Path, *, cache: bool = False) -> TracedModel:
    """Trace a saved Hugging Face model.

    With ``cache``, a decoder takes and returns the keys and values of earlier tokens; see
    ``cached_decoder``.

    Remote code is never run and pickles are never read. The class comes from ``architectures`` in
    ``config.json``; without that entry, from the class whose parameters match the checkpoint.

    Raises:
        UsageError: not a folder with a ``config.json``.
        UnsupportedModelError: unknown architecture, missing or damaged weights, not traceable.
    """

    def tasks(model: Any, what: str) -> dict[str, _Task]:
        vocabulary, limit = _vocabulary(model.config), max_positions(model.config)
        if cache:
            from subquad.converter.cached_decoder import cached_decoder

            return {"": _cached(cached_decoder(model, what, limit, vocabulary), limit)}
        inputs, axes = _example_inputs(model, what)
        sample = run_source_on_random(model, inputs, axes, vocabulary)
        return {"": _Task(model, inputs, axes, sample, limit)}

    return _traced_parts(folder, tasks)[""]


def is_encoder_decoder(folder: Path) -> bool:
    """Whether ``config.json`` says so."""
    path = folder / CONFIG_NAME
    return path.is_file() and bool(_load_config(folder, path).is_encoder_decoder)


def trace_encoder_decoder(folder: Path) -> dict[str, TracedModel]:
    """The two graphs of a saved encoder-decoder, ``encoder`` and ``decoder``.

    Raises:
        as ``trace_huggingface``.
    """

    def tasks(model: Any, what: str) -> dict[str, _Task]:
        from subquad.converter.encoder_decoder import encoder_decoder

        limits = {
            name: getattr(model.config, f"max_{place}_positions", None)
            or max_positions(model.config)
            for name, place in (("encoder", "source"), ("decoder", "target"))
        }
        parts = encoder_decoder(
            model,
            what,
            _example_inputs(model, what),
            limits["decoder"],
            _vocabulary(model.config),
        )
        return {name: _cached(part, limits[name]) for name, part in parts.items()}

    return _traced_parts(folder, tasks)


def _cached(decoder: CachedDecoder, limit: int | None) -> _Task:
    from subquad.converter.cached_decoder import BUNDLE

    sample = run_source(decoder.module, decoder.sample, BUNDLE)
    axes = decoder.dynamic_axes
    return _Task(decoder.module, decoder.inputs, axes, sample, limit, BUNDLE, cached=True)


def _traced_parts(
    folder: Path, tasks_of: Callable[[Any, str], Mapping[str, _Task]]
) -> dict[str, TracedModel]:
    """Load a model and trace what ``tasks_of`` the model and its name asks for."""
    config_path = folder / CONFIG_NAME
    if not config_path.is_file():
        raise UsageError(f"{folder} has no {CONFIG_NAME}, so it is no Hugging Face model folder.")
    checkpoint = open_checkpoint(folder)
    with quiet(), _no_progress_bars():
        config = _load_config(folder, config_path)
        model_class = _model_class(config, checkpoint)
        model, missing = _load_model(model_class, folder, config)
    what = f"{folder.name} ({model_class.__name__})"
    # With its samples, before the weights are let go.
    tasks = tasks_of(model, what)
    weights = _match_weights(model, checkpoint)
    source_hash = hash_files(source_files(folder, checkpoint))
    traced = {}
    for name, task in tasks.items():
        graph = export_module(
            task.module,
            task.inputs,
            task.axes,
            find_weight=_weight_finder(weights),
            what=what,
            bundle=task.bundle,
        )
        _refuse_emptied(graph, model)
        sampled = task.sample.named(graph)
        _drop_outputs_of_missing(graph, missing, what)
        specs = describe_signature(graph.graph)
        if task.cached:
            _require_cache(specs, what)
        traced[name] = TracedModel(
            model=graph,
            reference=graph.clone(),
            kind="huggingface",
            source_name=folder.name,
            source_hash=source_hash,
            inputs=specs[0],
            outputs=specs[1],
            companions=find_companions(folder),
            max_length=task.limit if any("length" in spec.shape for spec in specs[0]) else None,
            sample_inputs=task.sample.inputs,
            sample_outputs={
                value.name: sampled[value.name]
                for value in graph.graph.outputs
                if value.name in sampled
            },
        )
    return traced


def _require_cache(specs: tuple[Sequence[InputSpec], Sequence[OutputSpec]], what: str) -> None:
    """Every past is extended by the new tokens, and nothing else is done with it on the way."""
    pasts = {spec.name for spec in specs[0] if PAST in spec.shape}
    lost = sorted(pasts - {spec.past for spec in specs[1]})
    if lost:
        raise UnsupportedModelError(
            f"{what}: {lost[0]!r} does not come back with the new tokens behind it, so the cache "
            "of this model cannot be carried from call to call. Convert it without --cache."
        )


def source_files(folder: Path, checkpoint: Mapping[str, StoredTensor]) -> dict[str, Path]:
    """The files that determine the graph and the weights, by relative name."""
    files = {CONFIG_NAME: folder / CONFIG_NAME}
    if (folder / INDEX_NAME).is_file():
        files[INDEX_NAME] = folder / INDEX_NAME
    shards = {tensor.path for tensor in checkpoint.values()}
    for path in sorted(folder.glob("*.safetensors")):
        if path.resolve() in shards:
            files[path.name] = path
    return files


def find_companions(folder: Path) -> tuple[Path, ...]:
    """Tokenizer and config files, sorted by name."""
    found = {
        path for pattern in COMPANION_PATTERNS for path in folder.glob(pattern) if path.is_file()
    }
    # A pickle could hide behind `vocab*`; nothing pickled goes into an artifact.
    allowed = (".json", ".txt", ".model", ".jinja", "")
    return tuple(sorted(path for path in found if path.suffix in allowed))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _load_config(folder: Path, config_path: Path) -> Any:
    from transformers import AutoConfig

    try:
        raw = json.loads(config_path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{config_path} is not valid JSON: {error}.") from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise UnsupportedModelError(
            f"{config_path} names no model_type, so it is not the config of a transformers model."
        )
    if raw.get("quantization_config"):
        raise UnsupportedModelError(
            f"{config_path}: the checkpoint is quantised "
            f"({raw['quantization_config'].get('quant_method', 'unknown method')}). "
            "Dequantise it first: model.dequantize(), then save_pretrained."
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        hint = (
            " It brings its own code ('auto_map'), which is never run." if "auto_map" in raw else ""
        )
        raise UnsupportedModelError(
            f"transformers cannot read {config_path} (model_type {raw['model_type']!r}): "
            f"{_first_line(error)}.{hint} Pass the model as 'package.module:factory' instead."
        ) from error


def _model_class(config: Any, checkpoint: Mapping[str, StoredTensor]) -> Any:
    import transformers

    names = config.architectures or []
    for name in names:
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if names:
        raise UnsupportedModelError(
            f"config.json asks for the class {names[0]!r}, which this transformers "
            f"({transformers.__version__}) does not have. Pass the model as "
            "'package.module:factory' instead."
        )
    return _class_that_matches(config, checkpoint)


def _class_that_matches(config: Any, checkpoint: Mapping[str, StoredTensor]) -> Any:
    """The task class all of whose parameters the checkpoint has, with the fewest left over."""
    import torch
    from transformers.models.auto import modeling_auto

    candidates: dict[type, None] = {}
    for name in sorted(dir(modeling_auto)):
        if not (name == "MODEL_MAPPING" or name.startswith("MODEL_FOR_")) or not name.endswith(
            "_MAPPING"
        ):
            continue
        entry = getattr(modeling_auto, name).get(type(config), None)
        for item in entry if isinstance(entry, (tuple, list)) else (entry,):
            if isinstance(item, type):
                candidates[item] = None
    ranked: list[tuple[int, str, type]] = []
    for candidate in candidates:
        try:
            with torch.device("meta"):
                model = candidate(config)
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            logger.debug("%s does not fit the config: %s", candidate.__name__, error)
            continue
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        keys = set(model.state_dict())
        if keys - tied <= set(checkpoint):
            ranked.append((len(set(checkpoint) - keys), candidate.__name__, candidate))
    if not ranked:
        raise UnsupportedModelError(
            "config.json has no 'architectures' entry and no transformers class of model_type "
            f"{config.model_type!r} has exactly the parameters of the checkpoint. "
            "Add 'architectures': [\"<class name>\"] to config.json."
        )
    return min(ranked, key=lambda item: item[:2])[2]


def _load_model(model_class: Any, folder: Path, config: Any) -> tuple[Any, frozenset[str]]:
    import torch
    from safetensors import SafetensorError

    for part in (config, *(getattr(config, name, None) for name in _sub_configs(config))):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    try:
        model, info = model_class.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise UnsupportedModelError(f"{folder}: damaged safetensors: {error}.") from error
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, ImportError) as error:
        raise UnsupportedModelError(
            f"transformers cannot load {folder} as {model_class.__name__}: {_first_line(error)}."
        ) from error
    model.eval().requires_grad_(False)
    return model, frozenset(info["missing_keys"])


def _sub_configs(config: Any) -> Iterable[str]:
    return getattr(type(config), "sub_configs", {}) or {}


def _example_inputs(
    model: Any, what: str
) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    """Inputs as ``forward`` and ``main_input_name`` ask for, and their dynamic axes."""
    import inspect

    import torch

    config = model.config
    accepted = inspect.signature(model.forward).parameters
    inputs: dict[str, torch.Tensor] = {}
    axes: dict[str, dict[int, str]] = {}

    def add(name: str, tensor: torch.Tensor, dynamic: dict[int, str]) -> None:
        if name in accepted:
            inputs[name], axes[name] = tensor, dynamic

    limit = max_positions(config)
    length = _LENGTH if limit is None else min(_LENGTH, limit - 3)
    if length < 2:
        raise UnsupportedModelError(f"{what}: at most {limit} positions; too short to trace.")
    ids = torch.ones(_BATCH, length, dtype=torch.int64)
    sequence = {0: "batch", 1: "length"}
    main = model.main_input_name
    wants_text = main == "input_ids" or (
        hasattr(config, "text_config") and "input_ids" in accepted and "pixel_values" in accepted
    )
    if wants_text:
        add("input_ids", ids, sequence)
        add("attention_mask", torch.ones_like(ids), sequence)
        if (getattr(config, "type_vocab_size", 0) or 0) > 1:
            add("token_type_ids", torch.zeros_like(ids), sequence)
    if main == "pixel_values" or (wants_text and hasattr(config, "vision_config")):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None)
        if size is None:
            raise UnsupportedModelError(
                f"{what}: config.json gives no image_size, so no image can be made up to trace "
                "with. Pass the model as 'package.module:factory' with example inputs."
            )
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        add("pixel_values", torch.zeros(_BATCH, channels, height, width), {0: "batch"})
    elif main == "input_values":
        add("input_values", torch.zeros(_BATCH, 16000), {0: "batch", 1: "length"})
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions
        add("input_features", torch.zeros(_BATCH, config.num_mel_bins, frames), {0: "batch"})
    if getattr(config, "is_encoder_decoder", False):
        target = torch.ones(_BATCH, min(_TARGET_LENGTH, length), dtype=torch.int64)
        add("decoder_input_ids", target, {0: "batch", 1: "decoder_length"})
    if main not in inputs:
        raise UnsupportedModelError(
            f"{what}: main input {main!r} is not one of input_ids, pixel_values, input_values, "
            "input_features. Pass the model as 'package.module:factory' with example inputs."
        )
    return {name: inputs[name] for name in accepted if name in inputs}, axes


def max_positions(config: Any) -> int | None:
    """Longest sequence the config admits, where it says so."""
    for part in (config, getattr(config, "text_config", None)):
        limit = getattr(part, "max_position_embeddings", None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def _vocabulary(config: Any) -> int:
    """How many token numbers every embedding of tokens has; 2 where the config says nothing."""
    parts = (config, *(getattr(config, name, None) for name in _sub_configs(config)))
    sizes = [getattr(part, "vocab_size", None) for part in parts]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=2)


def _match_weights(
    model: torch.nn.Module, checkpoint: Mapping[str, StoredTensor]
) -> dict[int, StoredTensor]:
    """Which parameter is which checkpoint tensor, proved by comparing every value.

    A large matched parameter's memory is replaced by never-touched pages, so from here on the
    model weighs nothing; the export only looks at shapes.

    Returns:
        Address of each matched parameter -> its tensor. Addresses, because tied parameters have
        several names; they stay valid as long as ``model`` lives.
    """
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for key, stored in checkpoint.items():
        by_shape.setdefault(stored.shape, []).append(key)
    found: dict[int, StoredTensor] = {}
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        match = _matching_key(name, parameter, by_shape, checkpoint)
        # Every tensor has to let go of the loader's mapping of the file, or its pages stay.
        if match is not None and parameter.numel() >= _WORTH_RELEASING:
            parameter.data = _weightless(parameter)
        else:
            parameter.data = parameter.data.clone()
        if match is not None:
            found[parameter.data_ptr()] = checkpoint[match]
    return found


def _matching_key(
    name: str,
    parameter: torch.Tensor,
    by_shape: Mapping[tuple[int, ...], list[str]],
    checkpoint: Mapping[str, StoredTensor],
) -> str | None:
    import torch

    candidates = by_shape.get(tuple(parameter.shape), [])
    if parameter.dtype != torch.float32:
        return None
    # The likely key first: same name, or the same name with or without a base prefix.
    likely = sorted(
        candidates, key=lambda key: (key != name, not (key.endswith(name) or name.endswith(key)))
    )
    values = parameter.detach().numpy()
    return next((key for key in likely if _same_values(values, checkpoint[key])), None)


def _weightless(parameter: torch.Tensor) -> torch.Tensor:
    """Same shape and dtype, on pages that are never touched, hence never resident.

    A fresh mapping, not ``torch.empty``: that may reuse heap memory, which is resident already.
    """
    import torch

    pages = mmap.mmap(-1, parameter.numel() * parameter.element_size())
    return torch.frombuffer(pages, dtype=parameter.dtype).reshape(parameter.shape)


_WORTH_RELEASING = 1 << 16
_GUARDED_FROM = 1 << 10
_COMPARE_BLOCK = 1 << 21


def _same_values(values: np.ndarray[Any, Any], stored: StoredTensor) -> bool:
    """Bit-equal after the cast to float32, compared block by block."""
    flat = values.reshape(-1)
    dtype = stored.dtype.numpy()
    if not np.issubdtype(dtype, np.floating) and stored.dtype != ir.DataType.BFLOAT16:
        return False
    for start in range(0, max(flat.size, 1), _COMPARE_BLOCK):
        block = flat[start : start + _COMPARE_BLOCK]
        disk = np.fromfile(
            stored.path, dtype, count=block.size, offset=stored.offset + start * dtype.itemsize
        )
        if disk.size != block.size:
            return False
        if not np.array_equal(
            block.view(np.uint32), disk.astype(np.float32, copy=False).view(np.uint32)
        ):
            return False
    return True


def _refuse_emptied(traced: ir.Model, model: torch.nn.Module) -> None:
    """Our own invariant: no emptied parameter got into the graph as a copy of its zeros."""
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for name, value in traced.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or is_lazy(tensor) or tensor.size < _GUARDED_FROM:
            continue
        array = tensor.numpy()
        # What lies at a parameter's address was looked up there; an emptied one is lazy by now.
        assert array.ctypes.data in own or array.any(), (
            f"initializer {name!r} lost its values while it was traced"
        )


def _weight_finder(
    weights: Mapping[int, StoredTensor],
) -> Callable[[str, int], ir.TensorProtocol | None]:
    def find(name: str, address: int) -> ir.TensorProtocol | None:
        stored = weights.get(address)
        return None if stored is None else stored.to_ir(name, ir.DataType.FLOAT)

    return find


def _drop_outputs_of_missing(model: ir.Model, missing: frozenset[str], what: str) -> None:
    """Remove outputs that depend on parameters the checkpoint lacks (a pooler, often).

    transformers fills such parameters with random numbers; shipping those would be wrong.
    """
    if not missing:
        return
    tainted = {
        id(value)
        for name, value in model.graph.initializers.items()
        if name.removesuffix(".transposed") in missing
    }
    for node in model.graph:
        if any(value is not None and id(value) in tainted for value in node.inputs):
            tainted.update(id(value) for value in node.outputs)
    keep = [value for value in model.graph.outputs if id(value) not in tainted]
    if not keep:
        raise UnsupportedModelError(
            f"{what}: the checkpoint lacks parameters that every output needs, e.g. "
            f"{sorted(missing)[0]!r}. Name the class it was saved from in config.json "
            "('architectures')."
        )
    dropped = [value.name for value in model.graph.outputs if id(value) in tainted]
    if not dropped:
        return
    logger.warning(
        "%s: output %s dropped: the checkpoint lacks %s", what, dropped, sorted(missing)[:3]
    )
    model.graph.outputs[:] = keep
    import onnx_ir.passes.common as common

    with quiet():
        common.RemoveUnusedNodesPass()(model)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return next(line for line in text.splitlines() if line.strip()).strip().rstrip(".")
