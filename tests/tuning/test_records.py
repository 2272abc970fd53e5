"""Records: written whole, read in any state, merged, and looked up by nearness."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.host.targets import X86_64_V3, X86_64_V4
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.kernel import CPU_TEMPLATES
from subquad.kernels.operators import OPERATORS
from subquad.kernels.templates.space import Space
from subquad.kernels.tuning import choose
from subquad.kernels.tuning.bucket import bucket_of, distance
from subquad.kernels.tuning.choose import (
    Choice,
    TunedParameters,
    TuningBook,
    hinted_length,
    make_key,
    open_book,
    tuning_space,
    user_records,
)
from subquad.kernels.tuning.records import (
    Record,
    append_records,
    best_record,
    merge_records,
    read_records,
)
from subquad.kernels.tuning.workload import Workload, parse_shape
from subquad.runtime.errors import OutputError, UsageError
from tuning_cases import KEY, PLACE, SPACE, VARIANT, WORK, failed, record

WRITER = """
import sys
from pathlib import Path
from tuning_cases import append_records, record
# Not forever, in case nobody is left to kill it.
for _ in range(2000):
    append_records(Path(sys.argv[1]), [record()])
"""


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "r.jsonl"
    written = [record(), failed(), record(1, confirmed=True, threads=2)]
    append_records(path, written[:1])
    append_records(path, written[1:])
    assert read_records(path) == written


def test_a_line_cut_off_costs_itself_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.jsonl"
    append_records(path, [record(), record(4)])
    for cut in (1, 2, 17, len(record(4).to_line()) - 1):
        path.write_text(record().to_line() + record(4).to_line()[:-cut])
        append_records(path, [record(1)])
        found = read_records(path)
        # Without its newline alone, the line is whole.
        assert found == ([record(), record(4), record(1)] if cut == 1 else [record(), record(1)])
    assert "line 2" in caplog.text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": 2}, "schema is 2, this subquad reads 1"),
        ({"params": {"a": "2"}}, "a must be an integer, got '2'"),
        ({"params": [1]}, "no attribute 'items'"),
        ({"ratios": [0.5, float("nan"), 1.0]}, "an ok record needs three positive ratios"),
        ({"sizes": {"head_dim": 0}}, "sizes.head_dim must be a positive integer"),
        ({"kind": {"x": 3}}, "kind.x must be"),
        ({"status": "great"}, "unknown status 'great'"),
        ({"target": 3}, "target must be a string"),
    ],
)
def test_what_is_no_record_is_named(
    change: dict[str, Any], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(json.loads(record().to_line()) | change) + "\n")
    with pytest.raises(UsageError, match=f"holds no tuning records: line 1: .*{problem}"):
        read_records(path)
    append_records(path, [record()])
    assert read_records(path) == [record()]
    assert problem in caplog.text


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_records(tmp_path / "absent.jsonl")
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        append_records(tmp_path, [record()])
    (tmp_path / "empty.jsonl").touch()
    assert read_records(tmp_path / "empty.jsonl") == []


def test_killed_while_writing(tmp_path: Path) -> None:
    """Two writers, killed with SIGKILL at any moment: all lines are whole but perhaps the last."""
    path = tmp_path / "r.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    writers = [subprocess.Popen(command, env=environment) for _ in range(2)]
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < 40:
            assert all(writer.poll() is None for writer in writers)
            time.sleep(0.01)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    lines = path.read_text().splitlines(keepends=True)
    assert set(lines[:-1]) == {record().to_line()}
    append_records(path, [record(4)])
    assert read_records(path)[-1] == record(4)


def test_merge(tmp_path: Path) -> None:
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    append_records(one, [record(2), record(1)])
    append_records(two, [record(4), record(1)])
    assert merge_records([one, two], tmp_path / "a.jsonl") == 3
    assert merge_records([two, one], tmp_path / "b.jsonl") == 3
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert merge_records([one, two], one) == 3
    assert one.read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="holds no tuning records"):
        merge_records([one, tmp_path / "bad.jsonl"], one)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"1.jsonl", "2.jsonl", "a.jsonl", "b.jsonl", "bad.jsonl"}


def test_merge_of_the_best_only(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    other = dataclasses.replace(KEY, target="x86-64-v4")
    best = record(2, 0.8, confirmed=True)
    append_records(path, [record(4, 0.5), best, failed(), record(4, key=other)])
    assert merge_records([path], path, best_only=True) == 1
    assert read_records(path) == [best]


def test_what_another_machine_found_slower_is_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    fast = record(2, 0.7, confirmed=True)
    second = record(4, 0.9, confirmed=True)
    elsewhere = dataclasses.replace(record(2, 1.1), machine="another")
    append_records(path, [fast, second, elsewhere])
    assert merge_records([path], path, best_only=True) == 1
    assert read_records(path) == [second]

    # On one machine the confirmation outweighs a first, unlucky measurement.
    append_records(tmp_path / "one.jsonl", [fast, record(2, 1.1)])
    assert merge_records([tmp_path / "one.jsonl"], path, best_only=True) == 1
    assert read_records(path) == [fast]


def test_best_does_not_depend_on_the_order() -> None:
    lucky = record(4, 0.5)
    confirmed = record(2, 0.8, rounds=21, confirmed=True)
    later = record(4, 0.95, rounds=21, confirmed=True)
    records = [failed(1), lucky, confirmed, later]
    for order in itertools.permutations(records):
        assert best_record(order) == confirmed
    assert best_record([failed(), lucky, record(1, 0.6)]) == lucky
    assert best_record([failed()]) is None
    tied = [record(4, 0.8), record(2, 0.8)]
    assert best_record(tied) == best_record(tied[::-1])


def changed(**fields: Any) -> AttentionVariant:
    return dataclasses.replace(VARIANT, **fields)


def test_buckets() -> None:
    bucket = bucket_of(VARIANT, WORK)
    assert bucket_of(changed(scale=0.3), WORK) == bucket
    assert bucket_of(VARIANT, Workload(1, 600, 600)) == bucket
    assert bucket_of(changed(num_heads=16, num_kv_heads=16), WORK) == bucket
    for other, workload in (
        (changed(head_dim=32), WORK),
        (changed(num_kv_heads=4), WORK),
        (changed(window_right=-1), WORK),
        (changed(window_left=300), WORK),
        (changed(has_key_mask=True), WORK),
        (changed(softcap=30.0), WORK),
        (VARIANT, Workload(1, 1025, 1025)),
        (VARIANT, Workload(1, 1024, 1)),
        (VARIANT, Workload(3, 1024, 1024)),
    ):
        assert bucket_of(other, workload) != bucket, (other, workload)
    assert bucket_of(changed(window_left=300), WORK) == bucket_of(changed(window_left=500), WORK)


def test_distance_is_a_metric_on_sizes() -> None:
    bucket = bucket_of(VARIANT, WORK)
    assert distance(bucket, bucket) == 0
    assert distance(bucket, bucket_of(changed(head_dim=32), WORK)) == 2.0
    assert distance(bucket, bucket_of(VARIANT, Workload(1, 4096, 4096))) == 2.0
    assert distance(bucket, bucket_of(changed(has_key_mask=True), WORK)) == 2.0
    assert distance(bucket, bucket_of(changed(window_right=-1), WORK)) == 2.0
    one, other = (
        bucket_of(changed(alibi="signed"), WORK),
        bucket_of(changed(alibi="absolute"), WORK),
    )
    assert distance(one, other) is None
    assert distance(bucket, one) == distance(one, bucket) == 2.0
    elu = HybridVariant(12, 12, 64, 64, 0.125, allowed_right=0, feature_map="elu")
    assert distance(bucket, bucket_of(elu, WORK)) is None


def key_of(variant: AttentionVariant, length: int, **changes: Any) -> Any:
    key = make_key(variant, Workload(1, length, length), X86_64_V3, PLACE)
    return dataclasses.replace(key, **changes)


def book(*layers: list[Record]) -> TuningBook:
    return TuningBook(tuple({item.key: item for item in layer} for layer in layers))


def test_choice_says_where_it_comes_from() -> None:
    one = record(2, key=key_of(VARIANT, 1024))
    far = record(4, key=key_of(VARIANT, 4096))
    mine = book([far], [one])
    exact = mine.choose(one.key, SPACE)
    assert (exact.params, exact.how) == ({"a": 2}, "tuned")
    near = mine.choose(key_of(VARIANT, 2048), SPACE)
    # Both are one step away; the layer of the user comes first.
    assert (near.params, near.how) == ({"a": 4}, "nearest")
    assert "distance 1:" in near.note and "length=4096" in near.note
    assert mine.choose(key_of(VARIANT, 512), SPACE).params == {"a": 2}
    wide = changed(head_dim=256, value_dim=256)
    assert mine.choose(key_of(wide, 1024), SPACE) == Choice(
        {}, "default", "no records of this shape or one near it"
    )
    assert mine.choose(key_of(VARIANT, 1024, target="x86-64-v4"), SPACE).how == "default"


def test_where_defaults_won_a_near_shape_has_its_own() -> None:
    """Those of exact attention depend on the head dims."""
    mine = book([record(2, ratios=(1.0, 1.0, 1.0))])
    assert mine.choose(KEY, SPACE).params == {"a": 2}
    near = mine.choose(key_of(VARIANT, 2048), SPACE)
    assert (near.params, near.how) == ({}, "nearest")
    assert "1x the time of the defaults" in near.note


def test_other_versions_are_nearest_at_best() -> None:
    mine = book([record(2, key=key_of(VARIANT, 1024, template_version="0" * 16))])
    near = mine.choose(KEY, SPACE)
    assert (near.params, near.how) == ({"a": 2}, "nearest")
    assert "distance 1, other versions" in near.note


def test_parameters_that_no_longer_fit_are_passed_over() -> None:
    wrong = [
        record(3, key=key_of(VARIANT, 1024)),
        record(2, key=key_of(VARIANT, 2048), params=(("b", 2),)),
    ]
    assert book(wrong).choose(KEY, SPACE).how == "default"
    right = record(4, key=key_of(VARIANT, 4096))
    assert book([*wrong, right]).choose(KEY, SPACE).params == {"a": 4}


def test_files_of_a_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    monkeypatch.setattr(choose, "SHIPPED", tmp_path / "shipped")
    assert user_records() == tmp_path / "tuning.jsonl"
    append_records(tmp_path / "shipped" / "x86-64-v3.jsonl", [record(1, 0.7)])
    assert open_book().choose(KEY, SPACE).params == {"a": 1}
    append_records(user_records(), [record(2, 0.8), failed()])
    assert open_book().choose(KEY, SPACE).params == {"a": 2}
    append_records(tmp_path / "mine.jsonl", [record(4, 0.99)])
    assert open_book([tmp_path / "mine.jsonl"]).choose(KEY, SPACE).params == {"a": 4}
    with pytest.raises(UsageError, match="absent.jsonl cannot be read"):
        open_book([tmp_path / "absent.jsonl"])
    monkeypatch.delenv("SUBQUAD_CACHE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_records() == tmp_path / "data" / "subquad" / "tuning.jsonl"


def test_template_without_parameters() -> None:
    templates = {"Attention": "slow_kernels:TEMPLATE"}
    choice = TunedParameters(templates).choose(VARIANT, X86_64_V3)
    assert choice == Choice({}, "default", "the template of Attention has no tuning parameters")


@pytest.mark.parametrize(("longest", "hint"), [(None, 2048), (512, 512), (131072, 4096)])
def test_hinted_length(longest: int | None, hint: int) -> None:
    assert hinted_length(longest) == hint


def test_shipped_shapes_and_records() -> None:
    """The shapes that are tuned for the package can be tuned, and what ships can be used today."""
    settings = tomllib.loads((choose.SHIPPED / "tune.toml").read_text("utf-8"))["tune"]
    shapes = [parse_shape(text, OPERATORS) for text in settings["shapes"]]
    spaces = {}
    for target in (X86_64_V3, X86_64_V4):
        for variant, workload in shapes:
            space = tuning_space(variant, target, CPU_TEMPLATES)
            assert isinstance(space, Space), (variant, space)
            spaces[target.name, bucket_of(variant, workload)] = space
    for path in choose.SHIPPED.glob("*.jsonl"):
        for item in read_records(path):
            assert item.confirmed and item.key.target == path.stem
            assert spaces[path.stem, item.key.bucket].fits(dict(item.params)), item
