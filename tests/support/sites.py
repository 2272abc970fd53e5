"""Attention sites of every shape the methods must cope with."""

from __future__ import annotations

from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise.site import AttentionSite, MaskPredicate, Proof


def make_site(
    name: str,
    *,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (8, 8),
    left: int = UNLIMITED,
    right: int = UNLIMITED,
    key_padding: bool = True,
    softcap: float = 0.0,
    is_self: bool = True,
    scale: float = 0.31,
) -> AttentionSite:
    """A site of the given static sizes and mask."""
    return AttentionSite(
        name=name,
        index=0,
        source_form="decomposed",
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dims[0],
        value_dim=dims[1],
        scale=scale,
        softcap=softcap,
        mask=MaskPredicate(left, right, key_padding),
        is_self=is_self,
        source_output="source",
        output="output",
        proof=Proof("by construction", 0, 0, 0.0),
    )


SITES = (
    make_site("causal", right=0),
    make_site("causal_unpadded", right=0, key_padding=False),
    make_site("causal_grouped_odd", heads=(4, 2), dims=(7, 5), right=0),
    make_site("causal_one_kv_head", heads=(3, 1), dims=(5, 16), right=0, scale=0.5),
    make_site("causal_window", heads=(4, 2), left=9, right=0),
    make_site("causal_wide_window", left=1500, right=0),
    make_site("causal_softcap", right=0, softcap=2.5),
    make_site("full"),
    make_site("full_unpadded", key_padding=False),
    make_site("full_grouped_odd", heads=(4, 2), dims=(7, 5)),
    make_site("full_softcap", heads=(4, 2), softcap=2.5),
    make_site("full_band", dims=(8, 3), left=6, right=6),
    make_site("lopsided", left=4, right=UNLIMITED),
    make_site("cross", is_self=False),
)
