"""``docs/methods.md``: every method, from its own file.

    subquad methods --markdown > docs/methods.md        # make method-docs

What a method computes is its file's docstring; what it declines is found by asking it about sites
of several kinds; costs are counted as the planner counts them.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any

from subquad.kernels.operator import UNLIMITED
from subquad.passes.methods import METHODS, get_method, method_text
from subquad.passes.methods.base import WHOLE, Method, Parameters
from subquad.passes.prices import Shape, flops
from subquad.passes.recognise.site import AttentionSite, MaskPredicate, Proof
from subquad.runtime.errors import Rejection

LENGTHS = (1024, 4096, 16384)
_EXAMPLE = 256
"""Value of parameters without a default."""

_HEADER = """# Methods

Written by `subquad methods --markdown` (`make method-docs`) from the files in `passes/methods/`; a
test keeps it current.

Costs are floating-point operations relative to exact attention on {site},
counted as the planner counts them: what runs before the attention and products with learned maps
included. Parameters that have no default are {example}.

"""


def methods_page() -> str:
    """The whole page."""
    site = _site("causal")
    about = f"a causal site with {site.num_heads} query and {site.num_kv_heads} key/value heads of "
    header = _HEADER.format(site=about + str(site.head_dim), example=_EXAMPLE)
    lengths = " | ".join(f"cost at {length}" for length in LENGTHS)
    lines = [f"| method | operators | causal to | {lengths} |", "|---" * (3 + len(LENGTHS)) + "|"]
    for method in METHODS:
        params = example(method)
        name = f"[`{method_text(method, params)}`](#{method.name})"
        operators = ", ".join(dict.fromkeys(v.op_type for v in _variants(method, site, params)))
        costs = " | ".join(_relative_cost(method, site, params, length) for length in LENGTHS)
        lines.append(f"| {name} | {operators} | {_causality(method, params)} | {costs} |")
    sections = [_section(method) for method in METHODS]
    return header + "\n".join(lines) + "\n\n" + "\n".join(sections)


def example(method: Method[Any]) -> Parameters:
    """Its defaults; what has none gets a typical value."""
    required = {
        spec.name: _EXAMPLE for spec in fields(method.parameters) if spec.default is MISSING
    }
    return method.parameters(**required)


def _section(method: Method[Any]) -> str:
    module = inspect.getmodule(type(method))
    text = re.sub(r"``", "`", inspect.cleandoc(module.__doc__ or "")) if module else ""
    pieces = {1: "anywhere", WHOLE: "nowhere"}
    granularity = method.piece_granularity(example(method))
    rows = [
        f"* paper: {method.paper}",
        f"* causal to {_causality(method, example(method))}; a prefill may be cut "
        f"{pieces.get(granularity, f'at multiples of {granularity} tokens')}",
    ]
    if method.learns:
        rows.append("* has tensors that are fitted to activations (`--budget`, `--calibrate`)")
    rows += [f"* `{spec.name}`: {_parameter(spec)}" for spec in fields(method.parameters)]
    declined: dict[str, list[str]] = {}
    for kind in _SITES:
        refused = method.supports(_site(kind), example(method))
        if refused is not None:
            declined.setdefault(refused.reason, []).append(kind)
    rows += [f"* declines {' and '.join(kinds)}: {reason}" for reason, kinds in declined.items()]
    return f"## {method.name}\n\n{text}\n\n" + "\n".join(rows) + "\n"


def _parameter(spec: Any) -> str:
    meta = spec.metadata
    default = "no default" if spec.default is MISSING else f"default {spec.default}"
    if "options" in meta:
        what = "one of " + ", ".join(meta["options"])
    else:
        low, high = meta["range"]
        what = f"from {low:g}" if high > 1e9 else f"{low:g} to {high:g}"
        what += ", or one for each query head: `a/b/...`" if meta.get("per_head") else ""
    return f"{meta['meaning']} ({what}; {default})"


def _causality(method: Method[Any], params: Parameters) -> str:
    tokens = method.causal_granularity(params)
    return "the token" if tokens == 1 else f"blocks of {tokens}"


def _variants(method: Method[Any], site: AttentionSite, params: Parameters) -> tuple[Any, ...]:
    return (*method.prepare(site, params), method.lower(site, params))


def _relative_cost(
    method: Method[Any], site: AttentionSite, params: Parameters, length: int
) -> str:
    dense = get_method("dense")
    total = []
    for chosen, own in ((method, params), (dense, dense.parameters())):
        counts = [flops(v, Shape(1, length)) for v in _variants(chosen, site, own)]
        known = [count for count in counts if not isinstance(count, Rejection)]
        if len(known) < len(counts):
            return "unknown"
        total.append(sum(known))
    note = " x density" if any(hasattr(v, "block") for v in _variants(method, site, params)) else ""
    return f"{total[0] / total[1]:.2f}{note}"


_SITES: dict[str, dict[str, Any]] = {
    "causal": {"right": 0},
    "bidirectional": {},
    "causal attention in a window of 100": {"right": 0, "left": 99},
    "scores with a softcap": {"right": 0, "softcap": 30.0},
    "cross-attention": {"is_self": False},
}


def _site(kind: str) -> AttentionSite:
    choices = {
        "left": UNLIMITED,
        "right": UNLIMITED,
        "softcap": 0.0,
        "is_self": True,
        **_SITES[kind],
    }
    return AttentionSite(
        name=kind,
        index=0,
        source_form="decomposed",
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        value_dim=64,
        scale=0.125,
        softcap=choices["softcap"],
        mask=MaskPredicate(choices["left"], choices["right"], key_padding=True),
        is_self=choices["is_self"],
        source_output="",
        output="",
        proof=Proof("by construction", 0, 0, 0.0),
    )
