"""Methods that bring constants and nodes of their own: how these reach the graph and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from masked_attention import DIM, HEADS, attention_model, only_site, raised, random_feeds
from onnx_graphs import Runner
from subquad.kernels.body import Body
from subquad.kernels.operator import DOMAIN, TensorSpec
from subquad.passes.lower import lower_sites
from subquad.passes.methods.base import OneNode, Parameters, choice, number, parameter
from subquad.passes.plan import Assignment
from subquad.passes.recognise.site import AttentionSite
from subquad.passes.replace import replace_sites
from subquad.runtime.errors import Rejection, UsageError

QUERY = TensorSpec("query", "float32", ("batch", HEADS, "query_len", DIM))
VALUE = TensorSpec("value", "float32", ("batch", HEADS, "kv_len", DIM))
STEPS = TensorSpec("steps", "float32", (HEADS,))
GAIN = TensorSpec("gain", "float32", (HEADS,))


@dataclass(frozen=True)
class Gain:
    """``gain[h] = query_len / steps[h]``: prepares ``Scaled``."""

    op_type: str = "Gain"
    overload: str = "gain"
    inputs: tuple[TensorSpec | None, ...] = (QUERY, None, STEPS)
    outputs: tuple[TensorSpec, ...] = (GAIN,)

    def attributes(self) -> Mapping[str, ir.Attr]:
        return {}

    def build_function(self) -> ir.Function:
        body = Body()
        query, absent, steps = (ir.Value(name=name) for name in ("query", "absent", "steps"))
        gain = body("Div", body.as_float(body.dim(query, 2)), steps)
        return body.function(self.op_type, self.overload, [query, absent, steps], [gain], {})

    def reference(self, query: NDArray[Any], steps: NDArray[Any]) -> NDArray[np.float64]:
        return np.asarray(query.shape[2] / np.asarray(steps, np.float64))


@dataclass(frozen=True)
class Scaled:
    """``gain[h] * value``: what an attention would be without a query."""

    op_type: str = "Scaled"
    overload: str = "scaled"
    inputs: tuple[TensorSpec | None, ...] = (VALUE, GAIN)
    outputs: tuple[TensorSpec, ...] = (TensorSpec("output", "float32", VALUE.dims),)

    def attributes(self) -> Mapping[str, ir.Attr]:
        return {}

    def build_function(self) -> ir.Function:
        body = Body()
        value, gain = ir.Value(name="value"), ir.Value(name="gain")
        output = body("Mul", value, body.reshape(gain, 1, HEADS, 1, 1))
        return body.function(self.op_type, self.overload, [value, gain], [output], {})

    def reference(self, value: NDArray[Any], gain: NDArray[Any]) -> NDArray[np.float64]:
        return np.asarray(np.asarray(value, np.float64) * gain[:, None, None])


@dataclass(frozen=True)
class ScalingMethod(OneNode):
    name: str = "scaling"
    paper: str = "none"
    parameters: type[Parameters] = Parameters

    def supports(self, site: AttentionSite, params: Parameters) -> Rejection | None:
        return None

    def prepare(self, site: AttentionSite, params: Parameters) -> tuple[Gain, ...]:
        return (Gain(),)

    def tensors(self, site: AttentionSite, params: Parameters) -> Mapping[str, NDArray[Any]]:
        return {"steps": np.arange(1, site.num_heads + 1, dtype=np.float32)}

    def lower(self, site: AttentionSite, params: Parameters) -> Scaled:
        return Scaled()


def replaced() -> tuple[ir.Model, AttentionSite, list[Any]]:
    model, result = raised(attention_model(None))
    site = only_site(result)
    variants = replace_sites(model, [Assignment(site, ScalingMethod(), Parameters())])
    return model, site, variants


def test_a_prepared_node_and_a_constant_feed_the_attention() -> None:
    model, site, variants = replaced()
    assert variants == [(Gain(), Scaled())]
    ours = [node for node in model.graph if node.domain == DOMAIN]
    assert [(node.name, node.op_type) for node in ours] == [
        (f"{site.name}.Gain", "Gain"),
        (site.name, "Scaled"),
    ]
    (constant,) = (v for v in model.graph.initializers.values() if v.name == f"{site.name}.steps")
    assert constant.uses()
    feeds = random_feeds(np.random.default_rng(0), 2, 5, 5)
    (got,) = Runner(model)(feeds)
    want = feeds["v"] * (5.0 / np.arange(1, HEADS + 1, dtype=np.float32))[:, None, None]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_every_node_of_a_site_is_lowered_and_reported() -> None:
    model, _, variants = replaced()
    served = {("Scaled", "scaled"): "a.template"}
    declined = {("Gain", "gain"): Rejection("nobody wrote one")}
    (lowered,) = lower_sites(model, variants, served, declined)
    assert lowered.operator == "Scaled:scaled"
    assert lowered.kernel == "a.template"
    assert lowered.prepared == ("GainReference:gain",)
    assert lowered.reason == "Gain: nobody wrote one"
    ours = [node.op_type for node in model.graph if node.domain == DOMAIN]
    assert ours == ["GainReference", "Scaled"]
    Runner(model)(random_feeds(np.random.default_rng(0), 2, 5, 5))


@dataclass(frozen=True)
class AllKinds(Parameters):
    size: int = parameter("a size", minimum=1, default=4)
    share: float = number("a share", low=0.0, high=1.0, default=0.5)
    rule: str = choice("a rule", "first", "last", default="last")


def test_parameters_of_every_kind() -> None:
    params = AllKinds.parse("8,share=0.25,rule=first")
    assert params == AllKinds(8, 0.25, "first")
    assert params.describe() == "size=8,share=0.25,rule=first"
    assert AllKinds.parse(params.describe()) == params
    assert params.to_json() == {"size": 8, "share": 0.25, "rule": "first"}
    assert AllKinds(share=1).share == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("share=1.5", "'share' must be between 0.0 and 1.0, got 1.5"),
        ("share=nan", "'share' must be between 0.0 and 1.0, got nan"),
        ("share=much", "'share' must be a number, got 'much'"),
        ("rule=next", "'rule' must be one of first, last, got 'next'"),
        ("size=2.5", "'size' must be an integer, got '2.5'"),
    ],
)
def test_wrong_parameters_of_every_kind(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        AllKinds.parse(text)
    assert says in str(caught.value)
