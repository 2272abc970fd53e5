"""Linear attention with decay, and recurrences: raised where an operator says it, named else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import helper

from masked_attention import only_site, raised
from onnx_graphs import FLOAT, Graph, Runner, inferred
from subquad.passes.raise_attention import raise_attention
from subquad.passes.recognise.candidates import Candidate

B, N = "batch", "length"
HEADS, DIM, VALUE_DIM = 4, 6, 5
GAMMAS = np.array([0.97, 0.9, 0.75, 0.5], np.float32)
Arrays = dict[str, NDArray[Any]]
Factor = Callable[[Graph], str]


def distance(g: Graph) -> str:
    """``i - j`` as a float, ``[length, length]``."""
    slots = g("Cast", g.arange(g.dim("q", 2)), to=FLOAT)
    return g("Sub", g("Unsqueeze", slots, [1]), g("Unsqueeze", slots, [0]))


def per_head(gammas: NDArray[Any] = GAMMAS) -> NDArray[np.float32]:
    return gammas.astype(np.float32).reshape(-1, 1, 1)


def power(g: Graph) -> str:
    """``where(i >= j, gamma ** (i - j), 0)``."""
    apart = distance(g)
    return g("Where", g("GreaterOrEqual", apart, 0.0), g("Pow", per_head(), apart), 0.0)


def exponential(g: Graph) -> str:
    """``exp(log(gamma) * (i - j)) * causal``."""
    apart = distance(g)
    seen = g("Cast", g("GreaterOrEqual", apart, 0.0), to=FLOAT)
    return g("Mul", g("Exp", g("Mul", np.log(per_head()), apart)), seen)


def hidden_exponent(g: Graph) -> str:
    """``exp(where(i >= j, log(gamma) * (i - j), -inf))``, as ``masked_fill`` leads to."""
    apart = distance(g)
    logs = g("Mul", np.log(per_head()), apart)
    return g("Exp", g("Where", g("Less", apart, 0.0), float("-inf"), logs))


def scaled_positions(g: Graph) -> str:
    """The exponent is half the distance, the base a square."""
    apart = distance(g)
    powers = g("Pow", per_head(GAMMAS**2), g("Mul", apart, 0.5))
    return g("Where", g("Less", apart, 0.0), 0.0, powers)


def one_rate(g: Graph) -> str:
    apart = distance(g)
    return g("Where", g("GreaterOrEqual", apart, 0.0), g("Pow", np.float32(0.9), apart), 0.0)


def retention(
    factor: Factor, *, normalised: bool = False, kv_heads: int = HEADS, scale: float = 0.3
) -> ir.Model:
    g = Graph()
    q = g.input("q", FLOAT, [B, HEADS, N, DIM])
    k = g.input("k", FLOAT, [B, kv_heads, N, DIM])
    v = g.input("v", FLOAT, [B, kv_heads, N, VALUE_DIM])
    if normalised:
        q, k = g("Relu", q), g("Relu", k)
    if kv_heads != HEADS:
        k, v = (g("Gather", x, np.arange(HEADS) // (HEADS // kv_heads), axis=1) for x in (k, v))
    products = g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2]))
    if not normalised:
        products = g("Mul", products, scale)
    weights = g("Mul", products, factor(g))
    if normalised:
        total = g("ReduceSum", weights, [-1], keepdims=1)
        weights = g("Div", weights, g("Add", total, 1e-3))
    return g.model([g("Identity", g("MatMul", weights, v))])


def feeds(length: int, kv_heads: int = HEADS) -> Arrays:
    rng = np.random.default_rng(length)
    sizes = {"q": (HEADS, DIM), "k": (kv_heads, DIM), "v": (kv_heads, VALUE_DIM)}
    return {
        name: rng.standard_normal((2, heads, length, dim)).astype(np.float32)
        for name, (heads, dim) in sizes.items()
    }


def oracle(
    given: Arrays, gammas: NDArray[Any], *, normalised: bool, scale: float
) -> NDArray[np.float64]:
    q, k, v = (given[name].astype(np.float64) for name in "qkv")
    k, v = (np.repeat(x, HEADS // k.shape[1], axis=1) for x in (k, v))
    if normalised:
        q, k = np.maximum(q, 0), np.maximum(k, 0)
    slots = np.arange(q.shape[2])
    apart = slots[:, None] - slots
    powers = gammas.astype(np.float64).reshape(-1, 1, 1) ** np.maximum(apart, 0)
    weights = np.where(apart >= 0, (q @ k.swapaxes(-1, -2)) * powers, 0)
    if normalised:
        return np.asarray(weights @ v / (weights.sum(axis=-1, keepdims=True) + 1e-3))
    return np.asarray(scale * weights @ v)


def assert_decays(
    model: ir.Model,
    gammas: NDArray[Any] = GAMMAS,
    *,
    normalised: bool = False,
    kv_heads: int = HEADS,
) -> None:
    copy, result = raised(model)
    site = only_site(result)
    assert not result.rejections and site.mask.describe() == "causal" and site.linear is not None
    assert np.allclose(site.linear.log_decay, np.log(gammas.astype(float))[:: HEADS // kv_heads])
    assert site.num_kv_heads == kv_heads and site == type(site).from_json(site.to_json())
    assert not any(node.op_type == "MatMul" for node in copy.graph)
    ours = Runner(copy)
    for length in (1, 7, 63, 64, 65, 200):
        given = feeds(length, kv_heads)
        want = oracle(given, gammas, normalised=normalised, scale=0.3)
        got = ours(given)[0]
        # float32 sums of at most 200 keys, and logarithms of float32 powers
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


@pytest.mark.parametrize(
    "factor", [power, exponential, hidden_exponent, scaled_positions], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("normalised", [False, True])
def test_powers_of_the_distance(factor: Factor, normalised: bool) -> None:
    assert_decays(retention(factor, normalised=normalised), normalised=normalised)


def test_heads_that_share_keys_and_a_rate() -> None:
    gammas = np.full(HEADS, 0.9, np.float32)
    assert_decays(retention(one_rate, kv_heads=2), gammas, kv_heads=2)


def table_model(table: NDArray[Any]) -> ir.Model:
    """A fixed length, for which the powers are stored."""
    g = Graph()
    size = table.shape[-1]
    q, k = (g.input(name, FLOAT, [B, HEADS, size, DIM]) for name in "qk")
    v = g.input("v", FLOAT, [B, HEADS, size, VALUE_DIM])
    products = g("Mul", g("MatMul", q, g("Transpose", k, perm=[0, 1, 3, 2])), 0.3)
    weights = g("Mul", products, table.astype(np.float32))
    return g.model([g("Identity", g("MatMul", weights, v))])


def table_of_powers(size: int = 33) -> NDArray[np.float64]:
    apart = np.arange(size)[:, None] - np.arange(size)
    powers = GAMMAS.astype(float).reshape(-1, 1, 1) ** np.maximum(apart, 0)
    return np.asarray(np.where(apart >= 0, powers, 0))


def test_a_table_of_powers() -> None:
    copy, result = raised(table_model(table_of_powers()))
    site = only_site(result)
    assert site.linear is not None
    assert np.allclose(site.linear.log_decay, np.log(GAMMAS.astype(float)), rtol=1e-5)
    given = feeds(33)
    want = oracle(given, GAMMAS, normalised=False, scale=0.3)
    assert np.linalg.norm(Runner(copy)(given)[0] - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize(("row", "column"), [(20, 3), (32, 0), (4, 4), (3, 9)])
def test_a_table_that_differs_in_one_place(row: int, column: int) -> None:
    table = table_of_powers()
    table[1, row, column] += 0.01
    _, result = raised(table_model(table))
    assert not result.sites and len(result.rejections) == 1


# --- near misses -----------------------------------------------------------------------------


def both_sides(g: Graph) -> str:
    return g("Pow", per_head(), g("Abs", distance(g)))


def growing(g: Graph) -> str:
    apart = distance(g)
    return g("Where", g("GreaterOrEqual", apart, 0.0), g("Pow", per_head(1 / GAMMAS), apart), 0.0)


def from_the_start(g: Graph) -> str:
    """By the key's own position, not by the distance."""
    apart = distance(g)
    slots = g("Unsqueeze", g("Cast", g.arange(g.dim("q", 2)), to=FLOAT), [0])
    return g("Where", g("GreaterOrEqual", apart, 0.0), g("Pow", per_head(), slots), 0.0)


def one_late(g: Graph) -> str:
    """``gamma ** (i - j + 1)``: the query's own token decays."""
    apart = distance(g)
    powers = g("Pow", per_head(), g("Add", apart, 1.0))
    return g("Where", g("GreaterOrEqual", apart, 0.0), powers, 0.0)


def square(g: Graph) -> str:
    apart = distance(g)
    powers = g("Exp", g("Mul", -0.1, g("Mul", apart, apart)))
    return g("Where", g("GreaterOrEqual", apart, 0.0), powers, 0.0)


MISSES: dict[Factor, str] = {
    both_sides: "decay towards later keys as well",
    growing: "weights grow with the distance",
    from_the_start: "which is no decay by the distance",
    one_late: "which is no decay by the distance",
    square: "is no mask",
}


@pytest.mark.parametrize("factor", MISSES, ids=lambda f: f.__name__)
def test_near_misses(factor: Factor) -> None:
    model = retention(factor)
    copy, result = raised(model)
    assert not result.sites and len(result.rejections) == 1
    assert MISSES[factor] in result.rejections[0].reason
    assert np.array_equal(Runner(copy)(feeds(9))[0], Runner(model)(feeds(9))[0])


def test_heads_that_share_keys_and_no_rate() -> None:
    _, result = raised(retention(power, kv_heads=2))
    assert not result.sites
    assert "share keys decay at different rates" in result.rejections[0].reason


@pytest.mark.parametrize("change", [0.99, 1.01])
def test_a_wrong_rate_is_refused(change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.passes.recognise.retention import with_decay as real

    def wrong(*args: Any) -> Candidate:
        read = real(*args)
        assert read.linear is not None
        rates = tuple(rate * change for rate in read.linear.log_decay)
        return replace(read, linear=replace(read.linear, log_decay=rates))

    monkeypatch.setattr("subquad.passes.raise_attention.with_decay", wrong)
    _, result = raised(retention(power))
    assert not result.sites and "differs from the source" in result.rejections[0].reason


# --- the operator ----------------------------------------------------------------------------


def gated(decay: Callable[[Graph], str], state: Callable[[Graph], str] | None = None) -> ir.Model:
    g = Graph()
    q = g.input("q", FLOAT, [B, N, HEADS * DIM])
    k = g.input("k", FLOAT, [B, N, 2 * DIM])
    v = g.input("v", FLOAT, [B, N, 2 * VALUE_DIM])
    g.input("decays", FLOAT, [B, N, 2])
    past = None if state is None else state(g)
    y, _ = g.multi(
        "LinearAttention",
        *(q, k, v, past, decay(g)),
        outputs=2,
        domain="com.microsoft",
        q_num_heads=HEADS,
        kv_num_heads=2,
        update_rule="gated",
        scale=0.3,
    )
    return g.model([g("MatMul", y, np.eye(HEADS * VALUE_DIM, dtype=np.float32))])


def repeated(row: NDArray[Any]) -> Callable[[Graph], str]:
    """A row for every token."""

    def build(g: Graph) -> str:
        lengths = g("Shape", "q", start=0, end=2)
        shape = g("Concat", lengths, np.array([len(row)]), axis=0)
        return g("Expand", row.astype(np.float32).reshape(1, 1, -1), shape)

    return build


def zeros(g: Graph) -> str:
    batch = g("Shape", "q", start=0, end=1)
    return g("ConstantOfShape", g("Concat", batch, np.array([2, DIM, VALUE_DIM]), axis=0))


@pytest.mark.parametrize("state", [None, zeros], ids=["no state", "an empty state"])
@pytest.mark.parametrize("each", [1, DIM], ids=["per head", "per feature"])
def test_gated_with_a_fixed_decay(state: Any, each: int) -> None:
    gammas = np.array([0.9, 0.6], np.float32)
    model = gated(repeated(np.repeat(np.log(gammas), each)), state)
    copy, result = raised(model)
    site = only_site(result)
    assert not result.rejections and site.linear is not None
    assert site.linear.log_decay == pytest.approx(np.log(gammas.astype(float)), rel=1e-6)
    for length in (1, 7, 63, 64, 65):
        given = feeds(length, 2)
        flat = {n: x.swapaxes(1, 2).reshape(2, length, -1) for n, x in given.items()}
        want = oracle(given, np.repeat(gammas, 2), normalised=False, scale=0.3)
        got = Runner(copy)({**flat, "decays": np.zeros((2, length, 2), "f4")})[0]
        want = want.swapaxes(1, 2).reshape(2, length, -1)
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


@pytest.mark.parametrize(
    ("decay", "reason"),
    [
        (lambda g: "decays", "with a decay for each token"),
        (repeated(-np.arange(2 * DIM) / 20), "with a decay for each feature"),
        (repeated(np.array([0.1, -0.2])), "whose state grows"),
    ],
)
def test_other_gates_say_why(decay: Any, reason: str) -> None:
    _, result = raised(gated(decay))
    assert not result.sites and reason in result.rejections[0].reason


# --- recurrences -----------------------------------------------------------------------------


def cell() -> ir.Model:
    """A recurrent cell that multiplies element by element."""
    return scan(
        [
            helper.make_node("Mul", ["s", "k"], ["kept"]),
            helper.make_node("Mul", ["q", "v"], ["update"]),
            helper.make_node("Add", ["kept", "update"], ["new"]),
            helper.make_node("Tanh", ["new"], ["o"]),
        ],
        state=(DIM,),
        value_dim=DIM,
    )


PER_HEAD = per_head()
STEP = [
    helper.make_node("Mul", ["s", "decay"], ["kept"]),
    helper.make_node("Unsqueeze", ["k", "last"], ["column"]),
    helper.make_node("Unsqueeze", ["v", "before"], ["row"]),
    helper.make_node("Mul", ["column", "row"], ["update"]),
    helper.make_node("Add", ["kept", "update"], ["new"]),
    helper.make_node("Unsqueeze", ["q", "before"], ["query"]),
    helper.make_node("MatMul", ["query", "new"], ["o4"]),
    helper.make_node("Squeeze", ["o4", "before"], ["o5"]),
    helper.make_node("Mul", ["o5", "scale"], ["o"]),
]
BY_EINSUM = [
    helper.make_node("Mul", ["decay", "s"], ["kept"]),
    helper.make_node("Einsum", ["k", "v"], ["update"], equation="bhd,bhe->bhde"),
    helper.make_node("Add", ["update", "kept"], ["new"]),
    helper.make_node("Einsum", ["q", "new"], ["o5"], equation="bhd,bhde->bhe"),
    helper.make_node("Mul", ["o5", "scale"], ["o"]),
]
BEFORE_THE_UPDATE = [
    helper.make_node(n.op_type, ["query", "s"], ["o4"]) if n.output[0] == "o4" else n for n in STEP
]


def scan(
    nodes: list[onnx.NodeProto],
    *,
    state: tuple[int, ...] = (DIM, VALUE_DIM),
    value_dim: int = VALUE_DIM,
    decay: NDArray[Any] = PER_HEAD,
    axis: int = 0,
    zeros: bool = True,
    keep_end: bool = False,
    **attributes: Any,
) -> ir.Model:
    """Tokens along ``axis``; ``s`` is the state, ``o`` the result of a step."""
    info = helper.make_tensor_value_info
    widths = {"q": DIM, "k": DIM, "v": value_dim}
    body = helper.make_graph(
        nodes,
        "body",
        [
            info("s", FLOAT, [B, HEADS, *state]),
            *(info(name, FLOAT, [B, HEADS, width]) for name, width in widths.items()),
        ],
        [info("new", FLOAT, [B, HEADS, *state]), info("o", FLOAT, [B, HEADS, value_dim])],
    )
    axes: dict[str, Any] = {}
    if axis:
        axes = {"scan_input_axes": [axis] * 3, "scan_output_axes": [axis]}
    main = [
        helper.make_node(
            "Shape", ["q0"], ["batch_size"], start=int(not axis), end=2 - int(axis > 0)
        ),
        helper.make_node("Concat", ["batch_size", "state_shape"], ["shape"], axis=0),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node(
            "Scan",
            ["zeros" if zeros else "s0", "q0", "k0", "v0"],
            ["end", "out"],
            name="scan",
            num_scan_inputs=3,
            body=body,
            **axes,
            **attributes,
        ),
        helper.make_node("Identity", ["out"], ["y"]),
    ]

    def outside(width: int) -> list[int | str]:
        dims: list[int | str] = [B, HEADS, width]
        dims.insert(axis, N)
        return dims

    outputs = [info("y", FLOAT, outside(value_dim))]
    if keep_end:
        outputs.append(info("end", FLOAT, [B, HEADS, *state]))
    constants = {
        "last": np.array([-1]),
        "before": np.array([-2]),
        "decay": decay,
        "scale": np.array(0.3, np.float32),
        "state_shape": np.array([HEADS, *state]),
    }
    graph = helper.make_graph(
        main,
        "test",
        [
            *([] if zeros else [info("s0", FLOAT, [B, HEADS, *state])]),
            *(info(f"{name}0", FLOAT, outside(width)) for name, width in widths.items()),
        ],
        outputs,
        initializer=[onnx.numpy_helper.from_array(a, name) for name, a in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    onnx.checker.check_model(model)
    return inferred(ir.from_proto(model))


@pytest.mark.parametrize("nodes", [STEP, BY_EINSUM], ids=["matmul", "einsum"])
@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize(
    "gammas", [GAMMAS, np.full(HEADS, 0.9, np.float32), np.ones(HEADS, np.float32)]
)
def test_a_scan_over_tokens(nodes: list[onnx.NodeProto], axis: int, gammas: NDArray[Any]) -> None:
    shared = len(set(gammas)) == 1
    model = scan(nodes, axis=axis, decay=gammas[0].reshape(()) if shared else per_head(gammas))
    copy, result = raised(model)
    site = only_site(result)
    assert not result.rejections and site.mask.describe() == "causal" and site.linear is not None
    assert site.linear.log_decay == pytest.approx(
        () if gammas[0] == 1 else tuple(np.log(gammas.astype(float))), rel=1e-6
    )
    assert not any(node.op_type == "Scan" for node in copy.graph)
    for length in (1, 7, 63, 64, 65):
        given = feeds(length)
        want = oracle(given, gammas, normalised=False, scale=0.3)
        moved = {f"{n}0": np.moveaxis(x, 2, axis) for n, x in given.items()}
        got = np.moveaxis(Runner(copy)(moved)[0], axis, 2)
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


RECURRENCES: dict[str, tuple[Callable[[], ir.Model], str]] = {
    "an input as state": (lambda: scan(STEP, zeros=False), "begins with a state that is not zero"),
    "the state at its end": (lambda: scan(STEP, keep_end=True), "the state at its end is used"),
    "backwards": (
        lambda: scan(STEP, scan_input_directions=[1] * 3, scan_output_directions=[1]),
        "it runs backwards",
    ),
    "one backwards": (lambda: scan(STEP, scan_input_directions=[0, 1, 0]), "it runs backwards"),
    "the state before the update": (
        lambda: scan(BEFORE_THE_UPDATE),
        "not a query times the state with the token's own key",
    ),
    "a state that grows": (
        lambda: scan(STEP, decay=per_head(1 / GAMMAS)),
        "its state is multiplied by 1.0309",
    ),
    "a decay for each feature": (
        lambda: scan(STEP, decay=np.linspace(0.5, 1, DIM).astype("f4").reshape(DIM, 1)),
        "by more than one number for each head",
    ),
}


@pytest.mark.parametrize("name", RECURRENCES)
def test_other_recurrences_are_named(name: str) -> None:
    build, reason = RECURRENCES[name]
    result = raise_attention(build())
    assert not result.sites and [r.where for r in result.rejections] == ["scan"]
    assert "Scan adds up products of keys and values" in result.rejections[0].reason
    assert reason in result.rejections[0].reason


def test_cells_of_other_kinds_are_not_named() -> None:
    result = raise_attention(cell())
    assert not result.sites and not result.rejections
