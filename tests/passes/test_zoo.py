"""Small random Transformers models, traced: how many attentions are raised, and that none moves.

Weights are scaled up so that attention matters: scores spread far enough for an error of 1 % in
them to show. All but two models are slow to trace and run in ``make test-all`` only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnx_graphs import Runner
from subquad.passes.canonicalise import canonicalise
from subquad.passes.raise_attention import raise_attention

GAIN = 6
BASE = {
    "vocab_size": 256,
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Head sizes are no power of four: the root of none is exact.
DECODER = {**BASE, **TOKENS, "hidden_size": 48, "num_key_value_heads": 2, "use_cache": False}
IMAGE = {**BASE, "image_size": 32, "patch_size": 8}


@dataclass(frozen=True)
class Zoo:
    """A model and what must come of it: sites by meaning."""

    model: str
    config: str
    options: dict[str, Any]
    sites: dict[str, int]
    spellings: tuple[str, ...] = ("sdpa", "eager")
    described: bool = False
    """Whether ``sites`` are whole descriptions, not only masks."""
    gain: float = GAIN
    routers: int = 0
    """Softmaxes over experts: rejected, since they are no attention."""


ENCODER_DECODER = {
    "vocab_size": 256,
    "d_model": 60,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 512,
    "use_cache": False,
    "decoder_start_token_id": 2,
    **TOKENS,
}
MODELS = {
    "llama": Zoo("LlamaForCausalLM", "LlamaConfig", DECODER, {"causal, key padding": 2}),
    "qwen2": Zoo("Qwen2ForCausalLM", "Qwen2Config", DECODER, {"causal, key padding": 2}),
    "mistral": Zoo(
        "MistralForCausalLM",
        "MistralConfig",
        {**DECODER, "sliding_window": 16},
        {"causal, window 16, key padding": 2},
    ),
    "gemma3": Zoo(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **DECODER,
            "head_dim": 12,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"causal, window 16, key padding": 1, "causal, key padding": 1},
    ),
    "gemma2": Zoo(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**DECODER, "head_dim": 12, "sliding_window": 16},
        {"causal, window 16, key padding": 1, "causal, key padding": 1},
        spellings=("eager",),
    ),
    "gpt_neox": Zoo(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**BASE, "hidden_size": 48, "use_cache": False},
        {"causal, key padding": 2},
    ),
    "gpt2": Zoo(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 256, "n_embd": 60, "n_layer": 2, "n_head": 4, "use_cache": False},
        {"causal, key padding": 2},
    ),
    "bert": Zoo("BertModel", "BertConfig", BASE, {"full, key padding": 2}),
    "modernbert": Zoo(
        "ModernBertModel",
        "ModernBertConfig",
        {
            **BASE,
            **TOKENS,
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "local_attention": 16,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        {"full, key padding": 2, "band -8..+8, key padding": 2},
    ),
    "vit": Zoo("ViTModel", "ViTConfig", IMAGE, {"full": 2}),
    "bart": Zoo(
        "BartForConditionalGeneration",
        "BartConfig",
        ENCODER_DECODER,
        {"full, key padding": 2, "full, key padding (cross)": 2, "causal": 2},
    ),
    "t5": Zoo(
        "T5EncoderModel",
        "T5Config",
        {"vocab_size": 256, "d_model": 60, "d_kv": 15, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        {"full, key padding": 2},
        spellings=("eager",),
    ),
    "gpt_oss": Zoo(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **DECODER,
            "head_dim": 12,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "experts_implementation": "batched_mm",  # the one that exports
        },
        {"causal, window 16, key padding, sinks": 1, "causal, key padding, sinks": 1},
        spellings=("eager",),
        described=True,
        routers=2,
    ),
    "mpt": Zoo(
        "MptForCausalLM",
        "MptConfig",
        {
            "vocab_size": 256,
            "d_model": 60,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 512,
            "use_cache": False,
        },
        {"causal, key padding, ALiBi": 2},
        spellings=("eager",),
        described=True,
    ),
    "bloom": Zoo(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 256, "hidden_size": 60, "n_layer": 2, "n_head": 4, "use_cache": False},
        # It numbers real tokens: with holes in the mask that is no distance.
        {"causal, key padding, bias computed from attention_mask": 2},
        spellings=("eager",),
        described=True,
    ),
    "siglip": Zoo(
        "SiglipVisionModel",
        "SiglipVisionConfig",
        {key: value for key, value in IMAGE.items() if key != "vocab_size"},
        {"full": 2, "full (cross)": 1},
        spellings=("eager",),
        gain=3,  # larger ones amplify the rounding of float32
    ),
}
CASES = [
    pytest.param(
        name,
        spelling,
        marks=[]
        if (name, spelling) in (("mistral", "eager"), ("bert", "sdpa"))
        else pytest.mark.slow,
    )
    for name, zoo in MODELS.items()
    for spelling in zoo.spellings
]


def build(zoo: Zoo, spelling: str) -> tuple[Any, dict[str, Any], dict[str, dict[int, str]]]:
    """The model, example inputs and their dynamic axes."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, zoo.config)(**zoo.options)
    config._attn_implementation = spelling
    module = getattr(transformers, zoo.model)(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2 and zoo.config != "T5Config":  # T5 starts out wide
                parameter.mul_(zoo.gain)
    if zoo.config in ("ViTConfig", "SiglipVisionConfig"):
        return module, {"pixel_values": torch.randn(2, 3, 32, 32)}, {"pixel_values": {0: "batch"}}
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[-1, 19:] = 0
    inputs = {"input_ids": torch.randint(3, 250, (2, 24)), "attention_mask": mask}
    axes = {name: {0: "batch", 1: "length"} for name in inputs}
    if zoo.config == "BartConfig":
        inputs["decoder_input_ids"] = torch.randint(3, 250, (2, 13))
        axes["decoder_input_ids"] = {0: "batch", 1: "decoder_length"}
    return module, inputs, axes


def feeds(graph: ir.Graph, length: int) -> dict[str, NDArray[Any]]:
    """Row 0 whole, row 1 padded behind, row 2 in front, row 3 with holes."""
    rng = np.random.default_rng(length)
    mask = np.ones((4, length), np.int64)
    mask[1, length * 2 // 3 + 1 :] = 0
    mask[2, : length // 3] = 0
    mask[3] = rng.random(length) < 0.7
    mask[3, 0] = 1
    shapes = {
        "input_ids": (4, length),
        "decoder_input_ids": (4, length // 2 + 1),
        "pixel_values": (4, 3, 32, 32),
    }
    arrays: dict[str, NDArray[Any]] = {"attention_mask": mask}
    for name, shape in shapes.items():
        if name == "pixel_values":
            arrays[name] = rng.standard_normal(shape).astype(np.float32)
        else:
            arrays[name] = rng.integers(3, 250, shape)
    return {v.name or "": arrays[v.name or ""] for v in graph.inputs}


def largest_error(before: ir.Model, after: ir.Model) -> float:
    """Over several lengths, at real tokens, relative to the largest value."""
    source, ours, worst = Runner(before), Runner(after), 0.0
    for length in (3, 19, 70):
        given = feeds(before.graph, length)
        real = given.get("attention_mask")
        for want, got in zip(source(given), ours(given), strict=True):
            if want.dtype != np.float32:
                continue
            if real is not None and want.shape[:2] == real.shape:
                want, got = want[real > 0], got[real > 0]
            worst = max(worst, float(np.abs(want - got).max() / np.abs(want).max()))
    return worst


def scaled(model: ir.Model, factor: float) -> ir.Model:
    """A copy in which the scale of every raised attention is off."""
    copy = model.clone()
    for node in list(copy.graph):
        if node.domain == "ai.subquad":
            query = node.inputs[0]
            assert query is not None
            number = ir.Value(name=f"{node.name}.factor", const_value=ir.tensor([factor]))
            number.const_value.name = number.name  # type: ignore[union-attr]
            copy.graph.register_initializer(number)
            product = ir.node("Mul", [query, number])
            copy.graph.insert_before(node, product)
            node.replace_input_with(0, product.outputs[0])
    return copy


@pytest.mark.parametrize(("name", "spelling"), CASES)
def test_zoo(name: str, spelling: str, trace: Callable[..., Any]) -> None:
    zoo = MODELS[name]
    traced = trace(*build(zoo, spelling), name)
    model = traced.model
    canonicalise(model)
    result = raise_attention(model)
    assert len(result.rejections) == zoo.routers
    assert all("no attention" in rejection.reason for rejection in result.rejections)
    found = Counter(
        (site.describe() if zoo.described else site.mask.describe())
        + ("" if site.is_self else " (cross)")
        for site in result.sites
    )
    assert found == zoo.sites
    form = "Attention" if spelling == "sdpa" else "decomposed"
    assert {site.source_form for site in result.sites} == {form}
    # Two float32 evaluations of two layers, weights far from small; measured 1e-6.
    assert largest_error(traced.reference, model) < 2e-5
    # The comparison sees attention: an error of 1 % in the scale is no rounding error.
    assert largest_error(traced.reference, scaled(model, 1.01)) > 2e-4


@pytest.fixture
def trace() -> Callable[..., Any]:
    from subquad.converter.module import ModuleSource, trace_module

    def run(module: Any, inputs: Any, axes: Any, name: str) -> Any:
        return trace_module(ModuleSource(module, inputs, axes, name))

    return run
