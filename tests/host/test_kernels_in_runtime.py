"""Kernels inside ONNX Runtime: right numbers, and every failure with its reason."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from kernel_nodes import (
    BANDED,
    BOTH,
    CAPPED,
    FAILING,
    MASKED,
    PLAIN,
    RIGHT,
    SKIPPING,
    TEMPLATES,
    Feeds,
    node_feeds,
    open_node,
)
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.host.build import build_kernels
from subquad.kernels.host.targets import X86_64_V3
from subquad.kernels.one_node import one_node_model

MANY_KEYS = 8000
"""So many that a call on them runs on all threads."""


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def run(session: Any, feeds: Feeds) -> NDArray[np.float32]:
    result: NDArray[np.float32] = session.run(None, feeds)[0]
    return result


def assert_right(got: NDArray[np.float32], variant: AttentionVariant, feeds: Feeds) -> None:
    # float32 sums of at most 70 terms, or means of thousands.
    np.testing.assert_allclose(got, variant.reference(**feeds), atol=2e-6)


@pytest.mark.parametrize("variant", RIGHT, ids=lambda variant: variant.overload)
@pytest.mark.parametrize("threads", [1, 3])
def test_kernel_matches_the_formula(
    variant: AttentionVariant, threads: int, library: Path, rng: np.random.Generator
) -> None:
    session = open_node(variant, library, threads)
    # The last one is large enough for more than one thread.
    for batch, lengths in ((1, (1, 1)), (2, (9, 13)), (3, (70, 70)), (2, (1, MANY_KEYS))):
        feeds = node_feeds(variant, rng, batch, lengths)
        assert_right(run(session, feeds), variant, feeds)


def test_the_kernel_runs_and_not_the_function(library: Path, rng: np.random.Generator) -> None:
    feeds = node_feeds(SKIPPING, rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_POISON", "1")
        poisoned = open_node(SKIPPING, library)
        right = open_node(PLAIN, library)
    got = run(poisoned, feeds)
    assert np.isnan(got[:, :, -1]).all()
    assert np.isfinite(got[:, :, :-1]).all()
    assert np.isfinite(run(right, node_feeds(PLAIN, rng))).all()
    assert np.isfinite(run(open_node(SKIPPING, None), feeds)).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_failing_kernel_fails_the_run(
    threads: int, library: Path, rng: np.random.Generator
) -> None:
    session = open_node(FAILING, library, threads)
    feeds = node_feeds(FAILING, rng, 3, (9, 13 if threads == 1 else 2000))
    assert_right(run(session, feeds), FAILING, feeds)
    bad = feeds | {"query": feeds["query"].copy()}
    bad["query"][2, 1, 4, 0] = 1e7
    with pytest.raises(Exception, match="ValueError: query out of range") as caught:
        run(session, bad)
    assert FAILING.overload in str(caught.value)
    assert_right(run(session, feeds), FAILING, feeds)


def test_kernel_refuses_shapes_that_disagree(library: Path, rng: np.random.Generator) -> None:
    feeds = node_feeds(PLAIN, rng)
    feeds["value"] = feeds["value"][:, :, :-1].copy()
    with pytest.raises(Exception, match=f"kernel {PLAIN.overload} failed"):
        run(open_node(PLAIN, library), feeds)


@pytest.mark.parametrize(("batch", "lengths"), [(0, (4, 4)), (2, (0, 4)), (2, (4, 0))])
def test_empty_input_is_an_error(
    batch: int, lengths: tuple[int, int], library: Path, rng: np.random.Generator
) -> None:
    feeds = node_feeds(PLAIN, rng, batch, lengths)
    with pytest.raises(Exception, match="is empty: axis . has size 0"):
        run(open_node(PLAIN, library), feeds)


def test_rank_is_checked(library: Path, rng: np.random.Generator) -> None:
    model = one_node_model(MASKED)
    model.graph.input[3].type.tensor_type.ClearField("shape")
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feeds = node_feeds(MASKED, rng)
    feeds["key_mask"] = feeds["key_mask"][0]
    with pytest.raises(Exception, match="input key_mask must have .* 2 dimensions, got 9 and 1"):
        run(session, feeds)


def test_wrong_dtype_is_refused_at_load(library: Path) -> None:
    model = one_node_model(PLAIN)
    model.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    with pytest.raises(Exception, match="tensor.double."):
        onnxruntime.InferenceSession(model.SerializeToString(), options)


def test_unknown_variant_is_named(library: Path) -> None:
    with pytest.raises(Exception, match=f"no kernel for variant '{CAPPED.overload}'"):
        open_node(CAPPED, library)


def test_node_without_a_variant_is_refused(library: Path) -> None:
    model = one_node_model(PLAIN)
    (kept,) = (a for a in model.graph.node[0].attribute if a.name == "variant")
    model.graph.node[0].attribute.remove(kept)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    with pytest.raises(Exception, match="no attribute 'variant'"):
        onnxruntime.InferenceSession(model.SerializeToString(), options)


def test_inputs_must_be_those_of_the_variant(library: Path) -> None:
    model = one_node_model(MASKED)
    model.graph.node[0].input[3] = ""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feeds = node_feeds(MASKED, np.random.default_rng(0))
    with pytest.raises(Exception, match="input key_mask is absent, but the variant has one"):
        run(session, feeds)


@pytest.mark.parametrize("offset", [1, 4])
def test_inputs_may_lie_anywhere(offset: int, library: Path, rng: np.random.Generator) -> None:
    feeds = node_feeds(BOTH, rng)
    moved: Feeds = {}
    for name, array in feeds.items():
        room = np.zeros(array.nbytes + 64 + offset, np.uint8)
        start = -room.ctypes.data % 64 + offset
        view = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        assert view.ctypes.data % 64 == offset
        moved[name] = view
    assert_right(run(open_node(BOTH, library), moved), BOTH, feeds)


def test_sessions_of_one_process_do_not_mix(library: Path, rng: np.random.Generator) -> None:
    variants = (PLAIN, BANDED, MASKED, BOTH)
    sessions = [open_node(variant, library, threads=2) for variant in variants]
    tasks = [
        (s, v, node_feeds(v, rng, 2, (2, MANY_KEYS)))
        for s, v in zip(sessions, variants, strict=True)
    ] * 6
    failing = open_node(FAILING, library, threads=2)
    bad = node_feeds(FAILING, rng)
    bad["query"][:] = 1e7

    def work(number: int) -> None:
        session, variant, feeds = tasks[number]
        assert_right(run(session, feeds), variant, feeds)
        with pytest.raises(Exception, match="out of range"):
            run(failing, bad)

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(len(tasks))))
    del sessions
    assert_right(run(tasks[0][0], tasks[0][2]), PLAIN, tasks[0][2])


def test_two_libraries_in_one_process(library: Path, rng: np.random.Generator) -> None:
    small = build_kernels([MASKED], targets=[X86_64_V3], templates=TEMPLATES).libraries[0].path
    assert small != library
    first, second = open_node(MASKED, library), open_node(MASKED, small)
    with pytest.raises(Exception, match="no kernel for variant"):
        open_node(replace(MASKED, scale=0.25), small)
    feeds = node_feeds(MASKED, rng)
    del first
    assert_right(run(second, feeds), MASKED, feeds)


def test_nothing_is_printed(
    library: Path, rng: np.random.Generator, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = node_feeds(FAILING, rng)
    bad["query"][:] = 1e7
    session = open_node(FAILING, library)
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match="out of range"):
        session.run(None, bad, options)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("version", "serves"),
    [("1.26.9", True), ("1.17.0", False), ("0.99.0", True), ("garbage", True)],
)
def test_old_runtime_is_refused(library: Path, version: str, serves: bool) -> None:
    """The entry point, called by a made-up runtime that can only make a status."""
    messages: list[str] = []

    def note(code: int, message: bytes) -> int:
        messages.append(message.decode())
        return 4096

    create_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(note)
    table = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p))
    text = ctypes.create_string_buffer(version.encode())
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
        lambda wanted: ctypes.addressof(table) if serves or wanted == 1 else None
    )
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(text))
    base = (ctypes.c_void_p * 2)(
        ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(get_version, ctypes.c_void_p)
    )
    entry = ctypes.CDLL(str(library)).RegisterCustomOps
    entry.restype, entry.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p)
    assert entry(None, base) == 4096
    assert messages == [f"subquad kernels need ONNX Runtime 1.27 or newer, this is {version}"]
