"""Function bodies as ONNX: valid, allow-listed, sub-quadratic in memory, exact at odd sizes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import random_case, reference, relative_error, run
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.one_node import one_node_model

SIZES = (4, 2, 7, 5, 0.3)
VARIANTS: list[AttentionVariant | HybridVariant] = [
    AttentionVariant(*SIZES),
    AttentionVariant(*SIZES, has_key_mask=True),
    AttentionVariant(*SIZES, softcap=4.0, has_key_mask=True),
    AttentionVariant(*SIZES, window_right=0),
    AttentionVariant(*SIZES, window_right=0, has_key_mask=True),
    AttentionVariant(*SIZES, window_left=40, window_right=0, has_key_mask=True),
    AttentionVariant(*SIZES, window_left=5000, window_right=0, has_key_mask=True),
    AttentionVariant(*SIZES, window_left=10, has_key_mask=True),
    HybridVariant(*SIZES, 40, 0, sinks=4, allowed_right=0, has_key_mask=True),
    HybridVariant(*SIZES, 40, 0, 4, allowed_right=0, feature_map="elu", has_key_mask=True),
    HybridVariant(*SIZES, 40, 40, sinks=4, feature_map="elu", has_key_mask=True),
    HybridVariant(*SIZES, sinks=4, allowed_right=0, has_key_mask=True),
    HybridVariant(*SIZES, allowed_right=0, feature_map="elu", has_key_mask=True),
    HybridVariant(*SIZES, feature_map="elu"),
]
every_variant = pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: f"{v.op_type}_{v.overload}"
)

MICROSOFT_OPS = {"GroupQueryAttention", "MultiHeadAttention"}


def nodes_of(graph: onnx.GraphProto | onnx.FunctionProto) -> list[onnx.NodeProto]:
    """All nodes, those of branches included."""
    found: list[onnx.NodeProto] = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += nodes_of(attribute.g)
    return found


@every_variant
def test_model_is_valid_and_uses_allowed_ops(variant: AttentionVariant | HybridVariant) -> None:
    model = one_node_model(variant)
    onnx.checker.check_model(model)
    (function,) = model.functions
    assert (function.domain, function.name, function.overload) == (
        "ai.subquad",
        variant.op_type,
        variant.overload,
    )
    assert {opset.domain: opset.version for opset in function.opset_import}[""] == 24
    for node in nodes_of(function):
        if node.domain:
            assert (node.domain, node.op_type in MICROSOFT_OPS) == ("com.microsoft", True)
        else:
            onnx.defs.get_schema(node.op_type, 24)
            assert node.op_type != "Attention"


@every_variant
def test_building_twice_gives_the_same_bytes(variant: AttentionVariant | HybridVariant) -> None:
    assert one_node_model(variant) == one_node_model(variant)


def test_overloads_are_unique_identifiers() -> None:
    close = [
        AttentionVariant(2, 2, 4, 4, scale, window_left=left, window_right=right, has_key_mask=mask)
        for scale in (0.5, 0.5000000000000001, 1e-7)
        for left, right in ((-1, -1), (-1, 0), (1, 10), (11, 0))
        for mask in (False, True)
    ]
    close.append(AttentionVariant(2, 2, 4, 4, 0.5, softcap=0.5))
    overloads = [variant.overload for variant in [*close, *VARIANTS]]
    assert len(set(overloads)) == len(overloads)
    assert all(overload.isidentifier() for overload in overloads)


@pytest.mark.parametrize(
    "changes",
    [
        {"window_left": 4},
        {"window_left": 4, "window_right": 4, "allowed_right": 0},
        {"feature_map": "none"},
        {"feature_map": "elu", "allowed_left": 9, "allowed_right": 0},
        {"feature_map": "softplus"},
        {"feature_map": "elu", "mix": "sum"},
        {"feature_map": "elu", "sinks": -1},
        {"feature_map": "elu", "num_heads": 3},
        {"feature_map": "elu", "map_dim": 4},
        {"feature_map": "hedgehog"},
        {"window_left": 4, "window_right": 4, "has_decay": True},
        {"feature_map": "elu", "mix": "shared"},
        {"window_left": 4, "window_right": 4, "mix": "shared"},
        {"feature_map": "elu", "head_parts": ((4, 4, 0, 1),)},
        {"feature_map": "elu", "head_parts": ((4, 4, 0, 0),) * 4},
        {"feature_map": "none", "head_parts": ((4, 4, 0, 1),) * 4},
        {"sinks": 2, "head_parts": ((4, 4, 0, 0),) * 4},
    ],
)
def test_impossible_hybrids_are_refused(changes: dict[str, object]) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 7, "value_dim": 5, "scale": 0.3}
    with pytest.raises(ValueError):
        HybridVariant(**(sizes | changes))  # type: ignore[arg-type]


@every_variant
@pytest.mark.parametrize(
    ("query_len", "kv_len", "offset"), [(90, 90, 3), (90, 90, -3), (20, 90, 0), (90, 30, 0)]
)
def test_alignment_is_by_positions(
    variant: AttentionVariant | HybridVariant, query_len: int, kv_len: int, offset: int
) -> None:
    """Not by lengths: queries may start anywhere among the keys, or outnumber them."""
    rng = np.random.default_rng(9)
    longest = max(query_len, kv_len)
    case = random_case(rng, variant, query_len=longest, mask=rng.random((2, longest)) > 0.2)
    case = case.with_(
        query=case.query[:, :, :query_len],
        query_positions=case.query_positions[:, :query_len] + offset,
        key=case.key[:, :, :kv_len],
        value=case.value[:, :, :kv_len],
        key_mask=case.key_mask[:, :kv_len],
        key_positions=case.key_positions[:, :kv_len],
    )
    got, want = run(variant, case), reference(variant, case)
    assert relative_error(got, want) < 2e-6
    assert not got[want == 0.0].any()


def test_a_wide_window_binds() -> None:
    """Windows above the gathered limit use a tiled kernel; here some queries see only a hole."""
    variant = AttentionVariant(2, 1, 4, 3, 0.5, window_left=1100, window_right=0, has_key_mask=True)
    rng = np.random.default_rng(8)
    mask = np.ones((2, 2300), dtype=np.bool_)
    mask[1, 50:2250] = False
    case = random_case(rng, variant, query_len=2300, mask=mask)
    got, want = run(variant, case), reference(variant, case)
    # float32 sums of up to 1101 terms; rows of the hole see keys up to slot 1149 only.
    assert relative_error(got, want) < 2e-6
    assert not got[1, :, 1150:2250].any()
    assert got[1, :, :1150].all()
    # One key more or less in a window of 1101 is below any tolerance on sums: look at one key.
    loud = case.edited("value", lambda x: x[:, :, 10].fill(1e4))
    moved = (run(variant, loud) != got)[0].any(axis=(0, 2))
    assert np.array_equal(np.flatnonzero(moved), np.arange(10, 1111))


LONG: list[AttentionVariant | HybridVariant] = [
    AttentionVariant(1, 1, 4, 4, 0.3, has_key_mask=True),
    AttentionVariant(1, 1, 4, 4, 0.3, window_right=0, has_key_mask=True),
    AttentionVariant(1, 1, 4, 4, 0.3, window_left=40, window_right=40, has_key_mask=True),
    *(x for x in VARIANTS if isinstance(x, HybridVariant) and x.has_window),
    HybridVariant(1, 1, 4, 4, 0.3, allowed_right=0, feature_map="elu", has_key_mask=True),
    HybridVariant(1, 1, 4, 4, 0.3, feature_map="elu", has_key_mask=True),
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_stays_linear() -> None:
    """At 20000 tokens one float per pair would be 1.6 GB, one bool 0.4 GB, per head."""
    script = f"""
        import json
        import numpy as np
        from oracles import random_case, session
        from subquad.kernels.attention.semantics import AttentionVariant
        from subquad.kernels.hybrid.semantics import HybridVariant

        def peak_kib():
            with open("/proc/self/status") as file:
                return next(int(x.split()[1]) for x in file if x.startswith("VmHWM:"))

        mask = np.ones((1, 20000), dtype=np.bool_)
        mask[0, :100] = False
        growth = {{}}
        for variant in {LONG!r}:
            case = random_case(
                np.random.default_rng(0), variant, batch=1, query_len=20000, mask=mask
            )
            ready = session(variant)
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets the peak
            before = peak_kib()
            ready.run(None, case.feeds(variant))
            growth[variant.op_type + variant.overload] = (peak_kib() - before) / 1024
        print(json.dumps(growth))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parent.parent / "support",
        capture_output=True,
        text=True,
        check=True,
    )
    growth_mib = json.loads(done.stdout)
    print(growth_mib)
    assert len(growth_mib) == len(LONG)
    assert max(growth_mib.values()) < 300, growth_mib


SMALL = st.integers(1, 5)


@st.composite
def variants(draw: st.DrawFn) -> AttentionVariant | HybridVariant:
    kv_heads, group, head_dim, value_dim = draw(SMALL), draw(SMALL), draw(SMALL), draw(SMALL)
    sizes = (kv_heads * group, kv_heads, head_dim, value_dim, draw(st.sampled_from([0.25, 1.0])))
    mask = draw(st.booleans())
    limit = st.one_of(st.just(-1), st.integers(0, 150))
    if draw(st.booleans()):
        softcap = draw(st.sampled_from([0.0, 2.0]))
        return AttentionVariant(*sizes, softcap, draw(limit), draw(limit), has_key_mask=mask)
    causal = draw(st.booleans())
    window = draw(limit)
    return HybridVariant(
        *sizes,
        window_left=window,
        window_right=min(window, 0) if causal else window,
        sinks=draw(st.integers(1, 3)),
        allowed_right=0 if causal else -1,
        feature_map=draw(st.sampled_from(["none", "elu"])),
        has_key_mask=mask,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    variant=variants(),
    query_len=st.integers(1, 140),
    past=st.integers(0, 140),
    batch=st.integers(1, 3),
    keep=st.sampled_from([0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_any_variant_on_any_input(
    variant: AttentionVariant | HybridVariant,
    query_len: int,
    past: int,
    batch: int,
    keep: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    kv_len = query_len + past
    mask = rng.random((batch, kv_len)) < keep
    case = random_case(rng, variant, batch=batch, query_len=query_len, kv_len=kv_len, mask=mask)
    if not variant.has_key_mask:
        case = case.with_(key_mask=np.ones_like(mask))
    got, want = run(variant, case), reference(variant, case)
    # float32 rounding; few visible keys leave nothing to average it over.
    assert relative_error(got, want) < 3e-6
    assert not got[np.broadcast_to(want == 0.0, got.shape)].any()
