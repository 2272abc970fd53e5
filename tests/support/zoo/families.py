"""Small models of every family of Transformers that recognition must know; weights are random.

Weights are scaled up so that attention matters: scores spread far enough for an error of 1 % in
the scale to show. Head sizes are no power of four, so that the root of none is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

GAIN = 6
Spelling = Literal["sdpa", "eager"]
SPELLINGS: tuple[Spelling, ...] = ("sdpa", "eager")

BASE = {
    "vocab_size": 256,
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**BASE, **TOKENS, "hidden_size": 48, "num_key_value_heads": 2, "use_cache": False}
IMAGE = {
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
ENCODER_DECODER = {
    "vocab_size": 256,
    "d_model": 60,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "use_cache": False,
    "decoder_start_token_id": 2,
    **TOKENS,
}
SLIDING = ["sliding_attention", "full_attention"]

# Inputs of a kind: name -> (dimensions, what it holds).
TEXT = {"input_ids": ("batch length", "tokens"), "attention_mask": ("batch length", "mask")}
PIXELS = {"pixel_values": ("batch 3 32 32", "float")}
INPUTS: dict[str, dict[str, tuple[str, str]]] = {
    "text": TEXT,
    "pixels": PIXELS,
    "both": {**TEXT, **PIXELS},
    "two texts": {**TEXT, "decoder_input_ids": ("batch decoder_length", "tokens")},
    "speech to text": {
        "input_features": ("batch 16 128", "float"),
        "decoder_input_ids": ("batch decoder_length", "tokens"),
    },
    "samples": {"input_values": ("batch samples", "float")},
    "vectors": {"x": ("batch length 60", "float")},
    "vectors and padding": {
        "x": ("batch length 60", "float"),
        "hidden": ("batch length", "hidden"),
    },
}


@dataclass(frozen=True)
class Family:
    """One model.

    Attributes:
        model: class in Transformers, or a function of this module.
        config: its configuration class; "" for a function.
        options: of the configuration.
        inputs: key of ``INPUTS``.
        spellings: ``attn_implementation``s that exist.
        gain: factor on all matrices.
        sites: attentions in it.
    """

    model: str
    config: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "text"
    spellings: tuple[Spelling, ...] = SPELLINGS
    gain: float = GAIN
    sites: int = 2


FAMILIES: dict[str, Family] = {
    "bert": Family("BertModel", "BertConfig", BASE),
    "roberta": Family("RobertaModel", "RobertaConfig", {**BASE, **TOKENS}),
    "distilbert": Family(
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 256, "dim": 60, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    ),
    "albert": Family("AlbertModel", "AlbertConfig", {**BASE, "embedding_size": 24}),
    "mpnet": Family("MPNetModel", "MPNetConfig", BASE, spellings=("eager",)),
    "deberta_v2": Family(
        "DebertaV2Model",
        "DebertaV2Config",
        {
            **BASE,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 32,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
        },
        spellings=("eager",),
    ),
    "modernbert": Family(
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
        sites=4,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 256, "n_embd": 60, "n_layer": 2, "n_head": 4, "use_cache": False, **TOKENS},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**BASE, "hidden_size": 48, "use_cache": False, **TOKENS},
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {**BASE, **TOKENS, "ffn_dim": 96, "word_embed_proj_dim": 60, "use_cache": False},
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 256, "hidden_size": 60, "n_layer": 2, "n_head": 4, "use_cache": False},
        spellings=("eager",),
    ),
    "mpt": Family(
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
        spellings=("eager",),
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 20}),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 16}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**DECODER, "head_dim": 12, "sliding_window": 16, "layer_types": SLIDING},
        spellings=("eager",),
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, "head_dim": 12, "sliding_window": 16, "layer_types": SLIDING},
    ),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", DECODER),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **DECODER,
            "head_dim": 12,
            "sliding_window": 16,
            "layer_types": SLIDING,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            # The default loops over the experts that some token chose, which is no graph.
            "experts_implementation": "batched_mm",
        },
        spellings=("eager",),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 256,
            "d_model": 60,
            "d_kv": 15,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
        inputs="two texts",
        gain=1,  # T5 starts out wide
        sites=6,
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {**ENCODER_DECODER, "max_position_embeddings": 512},
        inputs="two texts",
        sites=6,
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **ENCODER_DECODER,
            "num_mel_bins": 16,
            "max_source_positions": 64,
            "max_target_positions": 128,
        },
        inputs="speech to text",
        sites=6,
    ),
    "vit": Family("ViTModel", "ViTConfig", IMAGE, inputs="pixels"),
    "deit": Family("DeiTModel", "DeiTConfig", IMAGE, inputs="pixels"),
    "dinov2": Family("Dinov2Model", "Dinov2Config", IMAGE, inputs="pixels"),
    "swin": Family(
        "SwinModel",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 30,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        inputs="pixels",
        sites=4,
    ),
    "clip": Family(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**BASE, **TOKENS}, "vision_config": IMAGE, "projection_dim": 32},
        inputs="both",
        gain=3,
        sites=4,
    ),
    "siglip": Family(
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {**BASE, **TOKENS}, "vision_config": IMAGE},
        inputs="both",
        gain=3,
        sites=5,
    ),
    "wav2vec2": Family(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {
            "hidden_size": 60,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "conv_dim": (32, 32, 32),
            "conv_stride": (5, 2, 2),
            "conv_kernel": (10, 3, 3),
            "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
        inputs="samples",
    ),
    "nn.TransformerEncoder": Family(
        "transformer_encoder", inputs="vectors and padding", spellings=("sdpa",), gain=4
    ),
    "nn.MultiheadAttention": Family("multihead_attention", inputs="vectors", gain=4, sites=1),
    "nn.Module": Family("plain_module", inputs="vectors", spellings=("sdpa",), sites=1),
}


def build(name: str, spelling: Spelling) -> Any:
    """The ``nn.Module`` in eval mode; always the same weights."""
    import torch
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(0)
    if not family.config:
        module = _MODULES[family.model](spelling)
    else:
        config = getattr(transformers, family.config)(**family.options)
        config._attn_implementation = spelling
        module = getattr(transformers, family.model)(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2 and not parameter.any():
                parameter.normal_()  # Swin's table of relative positions starts out as zeros
            elif parameter.dim() >= 2:
                parameter.mul_(family.gain)
    return module.eval()


def _without_fast_path() -> None:
    """One operator for a whole layer, which no exporter knows."""
    import torch

    torch.backends.mha.set_fastpath_enabled(False)


def _transformer_encoder(spelling: Spelling) -> torch.nn.Module:
    """Pre-norm encoder with a padding mask, as written by hand."""
    from torch import Tensor, nn

    _without_fast_path()

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(60, 4, 96, 0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            result: Tensor = self.encoder(x, src_key_padding_mask=hidden)
            return result

    return Encoder()


def _multihead_attention(spelling: Spelling) -> torch.nn.Module:
    """Packed projections; ``eager`` asks for the weights, which takes another path in torch."""
    from torch import Tensor, nn

    _without_fast_path()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(60, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.attention(x, x, x, need_weights=spelling == "eager")[0]
            return result

    return Layer()


def _plain_module(spelling: Spelling) -> torch.nn.Module:
    """Causal ``scaled_dot_product_attention`` with its flag, over one projection of all three."""
    from torch import Tensor, nn
    from torch.nn.functional import scaled_dot_product_attention

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(60, 180)
            self.out = nn.Linear(60, 60)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q, k, v = self.qkv(x).reshape(batch, length, 3, 4, 15).permute(2, 0, 3, 1, 4)
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
            result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, 60))
            return result

    return Layer()


_MODULES: dict[str, Callable[[Spelling], Any]] = {
    "transformer_encoder": _transformer_encoder,
    "multihead_attention": _multihead_attention,
    "plain_module": _plain_module,
}
