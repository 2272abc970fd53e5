"""An artifact as a transformers model: ``generate`` and ``pipeline`` run on it.

    model = ArtifactForCausalLM.from_artifact("out")
    tokenizer = AutoTokenizer.from_pretrained("out")
    pipeline("text-generation", model=model, tokenizer=tokenizer)("Once upon a time")

Logits come from ONNX Runtime; torch only chooses tokens. There are no gradients.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from subquad.runtime.artifact import Artifact, load
from subquad.runtime.decoding import Decoding, decoding_reason
from subquad.runtime.errors import UsageError
from subquad.runtime.kernel_library import KernelMode

_FIELDS = set(CausalLMOutputWithPast.__dataclass_fields__)
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"
"""What this release of transformers calls the cache."""


class ArtifactCache(Cache):  # type: ignore[misc]
    """What an artifact keeps of some rows; made by the model."""

    def __init__(self, artifact: Artifact, rows: int) -> None:
        # The layer only answers questions about its kind.
        super().__init__(layers=[DynamicLayer()])
        self.decoding = Decoding(artifact, rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.decoding.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.decoding.reorder(beam_idx.cpu().numpy())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.decoding.reorder(indices.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.decoding.reorder(np.repeat(np.arange(len(self.decoding.real)), repeats))

    def crop(self, max_length: int) -> None:
        raise NotImplementedError(
            "An artifact's cache cannot forget tokens, so assisted decoding does not work with it."
        )


class ArtifactForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A language model whose forward pass is an artifact with a cache."""

    main_input_name = "input_ids"
    # Of the source; nothing here computes attention.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, config: Any, artifact: Artifact) -> None:
        super().__init__(config)
        self.artifact = artifact
        # transformers asks a parameter for device and type.
        self.anchor = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    @classmethod
    def from_artifact(
        cls,
        path: str | os.PathLike[str],
        *,
        provider: str = "cpu",
        threads: int | None = None,
        kernels: KernelMode = "auto",
    ) -> ArtifactForCausalLM:
        """Load the artifact directory ``path``; arguments as of ``subquad.load``.

        Raises:
            UsageError: it was converted without a cache, or has no ``config.json``.
            and what ``load`` raises.
        """
        artifact = load(path, provider=provider, threads=threads, kernels=kernels)
        reason = decoding_reason(artifact.manifest)
        if reason:
            raise UsageError(reason)
        if not (artifact.path / "config.json").is_file():
            raise UsageError(f"{artifact.path} has no config.json: it is of no transformers model.")
        config = AutoConfig.from_pretrained(
            artifact.path, local_files_only=True, trust_remote_code=False
        )
        model = cls(config, artifact)
        if (artifact.path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(
                artifact.path, local_files_only=True
            )
        model.eval()
        return model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: ArtifactCache | None = None,
        past_key_values: ArtifactCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of ``input_ids``, ``[batch, length]``, which follow what the cache has seen.

        Raises:
            ValueError: an argument that this model does not know, or that contradicts the cache.
        """
        known = {"logits_to_keep", "output_attentions", "output_hidden_states", "labels"}
        asked = sorted(name for name, value in kwargs.items() if value is not None and value)
        if set(asked) - {"logits_to_keep"}:
            word = "does not return" if set(asked) <= known else "does not know"
            raise ValueError(f"An artifact {word} what {asked[0]!r} asks for.")
        rows, count = input_ids.shape
        held = cache if cache is not None else past_key_values
        if held is None:
            held = ArtifactCache(self.artifact, rows)
        decoding = held.decoding
        real = np.ones((rows, count), np.bool_)
        if attention_mask is not None:
            mask = attention_mask.cpu().numpy() != 0
            real = mask[:, -count:]
            before = mask[:, :-count]
            if before.shape != decoding.real.shape or (before != decoding.real).any():
                raise ValueError(
                    f"attention_mask must cover the {decoding.length} tokens of the cache as they "
                    f"were given and {count} new ones; it has shape {list(mask.shape)}."
                )
        if position_ids is not None:
            _check_positions(position_ids.cpu().numpy(), decoding.real, real)
        logits = torch.from_numpy(decoding.advance(input_ids.cpu().numpy(), real))
        keep = kwargs.get("logits_to_keep") or 0
        return CausalLMOutputWithPast(logits=logits[:, -keep:], **{CACHE: held})

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if model_kwargs.get(CACHE) is None:
            # Beams and several returned sequences are rows of their own by now.
            ids = next(a for a in (model_kwargs.get("attention_mask"),) if a is not None)
            model_kwargs[CACHE] = ArtifactCache(self.artifact, ids.shape[0])


def _check_positions(
    given: np.ndarray[Any, Any], before: np.ndarray[Any, Any], real: np.ndarray[Any, Any]
) -> None:
    """Positions follow from the mask; others would be ignored, so they are refused."""
    whole = np.concatenate([before, real], axis=1)
    wanted = (np.cumsum(whole, axis=1) - 1)[:, -real.shape[1] :]
    if (np.broadcast_to(given, real.shape) != wanted)[real].any():
        raise ValueError("position_ids must count the real tokens of attention_mask from 0.")
