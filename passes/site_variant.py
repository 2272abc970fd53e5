"""The operator that computes a site exactly."""

from __future__ import annotations

from typing import TypeAlias

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.passes.recognise.site import AttentionSite, LinearForm, MaskPredicate

ExactVariant: TypeAlias = AttentionVariant | HybridVariant


def linear_variant(
    sizes: tuple[int, int, int, int], scale: float, mask: MaskPredicate, form: LinearForm
) -> HybridVariant:
    """Linear attention; ``sizes`` as ``HybridVariant`` begins with them."""
    return HybridVariant(
        *sizes,
        scale if form.normaliser == "none" else 1.0,
        allowed_left=mask.window_left,
        allowed_right=mask.window_right,
        feature_map=form.feature_map,
        has_key_mask=mask.key_padding,
        normaliser=form.normaliser,
        epsilon=form.epsilon,
        least=form.least,
        has_decay=bool(form.log_decay),
    )


def exact_variant(site: AttentionSite) -> ExactVariant:
    """``Attention``, or ``HybridAttention`` without exact keys for a linear site."""
    sizes = (site.num_heads, site.num_kv_heads, site.head_dim, site.value_dim)
    if site.linear is not None:
        return linear_variant(sizes, site.scale, site.mask, site.linear)
    return AttentionVariant(
        *sizes,
        site.scale,
        site.softcap,
        window_left=site.mask.window_left,
        window_right=site.mask.window_right,
        has_key_mask=site.mask.key_padding,
        score_bias=site.score_bias,
        alibi=site.alibi,
        has_sink_logits=site.has_sinks,
        score_function=site.score_function,
        score_offset=site.score_offset,
    )
