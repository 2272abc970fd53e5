"""``subquad generate`` and transformers' ``generate`` write what torch writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import tiny_artifact
import tiny_decoders
from subquad.cli import cli
from subquad.converter.pipeline import convert
from subquad.converter.transformers_model import ArtifactForCausalLM
from subquad.runtime.errors import UsageError
from subquad.runtime.generate import generate, token_setting
from subquad.runtime.sampling import Sampling
from tiny_decoders import Make

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
PROMPTS = ((5, 17, 90, 3, 3, 41, 8), (77,), (1, 2, 3, 4))
NEW = 12


def _greedy(model: object, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """By torch, one whole pass per token."""
    ids = np.array([prompt])
    for _ in range(NEW):
        logits = tiny_decoders.whole_pass(model, ids, np.ones(ids.shape, np.bool_))
        ids = np.concatenate([ids, logits[:, -1].argmax(axis=-1)[:, None]], axis=1)
    return tuple(int(token) for token in ids[0, len(prompt) :])


@pytest.mark.parametrize("chunk", [3, 512])
def test_a_padded_batch_is_its_rows_in_torch(converted: Make, chunk: int) -> None:
    made = converted("llama")
    result = generate(made.artifact, ids=PROMPTS, max_new_tokens=NEW, prefill_chunk=chunk)
    assert [row.ids for row in result.rows] == [_greedy(made.model, p) for p in PROMPTS]
    assert [row.stopped for row in result.rows] == ["max_new_tokens"] * 3
    # 2 layers x key and value x 3 rows x 2 heads x 10 dims x (7 + 11 tokens) x 4 bytes
    assert result.cache_bytes == 2 * 2 * 3 * 2 * 10 * (7 + NEW - 1) * 4


def test_a_row_that_ends_leaves_the_others_alone(converted: Make) -> None:
    made = converted("llama")
    full = generate(made.artifact, ids=PROMPTS, max_new_tokens=NEW)
    end = full.rows[0].ids[2]
    ended = generate(made.artifact, ids=PROMPTS, max_new_tokens=NEW, ends=(end,))
    for before, after in zip(full.rows, ended.rows, strict=True):
        stop = before.ids.index(end) + 1 if end in before.ids else NEW
        assert after.ids == before.ids[:stop]
        assert after.stopped == ("end" if end in before.ids else "max_new_tokens")


def test_positions_run_out(converted: Make) -> None:
    prompt = tuple(range(100)) + tuple(range(24))
    result = generate(converted("llama").artifact, ids=(prompt,), max_new_tokens=50)
    assert len(result.rows[0].ids) == 4 and result.rows[0].stopped == "max_length"
    with pytest.raises(UsageError, match="accepts at most 128"):
        generate(converted("llama").artifact, ids=(prompt * 2,))


def test_drawn_rows_depend_on_the_seed_only(converted: Make) -> None:
    folder = converted("llama").artifact
    sampling = Sampling(temperature=1.5, top_k=20, seed=3)
    both = generate(folder, ids=PROMPTS[:2], max_new_tokens=NEW, sampling=sampling)
    again = generate(folder, ids=PROMPTS[:2], max_new_tokens=NEW, sampling=sampling)
    alone = generate(folder, ids=PROMPTS[:1], max_new_tokens=NEW, sampling=sampling)
    other = generate(folder, ids=PROMPTS[:1], max_new_tokens=NEW, sampling=Sampling(1.5, 20, 1, 4))
    assert [row.ids for row in both.rows] == [row.ids for row in again.rows]
    assert both.rows[0].ids == alone.rows[0].ids != other.rows[0].ids


def test_bad_prompts(converted: Make, tmp_path: Path) -> None:
    folder = converted("llama").artifact
    with pytest.raises(UsageError, match="either --text"):
        generate(folder)
    with pytest.raises(UsageError, match="no tokens"):
        generate(folder, ids=((),))
    with pytest.raises(UsageError, match="no tokenizer"):
        generate(folder, texts=("a",))


def test_an_artifact_without_a_cache_says_so(tmp_path: Path) -> None:
    tiny_artifact.build(tmp_path / "plain")
    with pytest.raises(UsageError, match="Convert it with --cache"):
        generate(tmp_path / "plain", ids=((1,),))


def test_command(converted: Make) -> None:
    made = converted("llama")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["generate", str(made.artifact), *arguments])

    prompt = ",".join(map(str, PROMPTS[0]))
    shown = run("--ids", prompt, "--max-new-tokens", str(NEW), "--json")
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert tuple(report["rows"][0]["ids"]) == _greedy(made.model, PROMPTS[0])
    assert report["rows"][0]["text"] is None and report["step_seconds"] > 0
    plain = run("--ids", prompt, "--ids", "77", "--max-new-tokens", "3")
    assert len(plain.stdout.splitlines()) == 2 and "ms/step" in plain.stderr
    for wrong in ((), ("--text", "a"), ("--ids", "1000"), ("--ids", "1", "--top-p", "0")):
        result = run(*wrong)
        assert result.exit_code == 2 and not result.stdout, wrong


def test_transformers_generates_with_it(converted: Make) -> None:
    made = converted("llama")
    model = ArtifactForCausalLM.from_artifact(made.artifact)
    ids = torch.tensor([[0, 0, 0, 1, 2, 3, 4], PROMPTS[0]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    for search in ({"do_sample": False}, {"num_beams": 3, "do_sample": False}):
        want = made.model.generate(ids, **options, **search)
        assert torch.equal(model.generate(ids, **options, **search), want)
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, mask, output_attentions=True)
    with pytest.raises(ValueError, match="position_ids must count"):
        model(ids, mask, position_ids=torch.arange(7)[None])


@pytest.mark.slow
def test_text_of_the_demo_model(tmp_path: Path) -> None:
    convert(DEMO_MODEL, tmp_path / "demo", cache=True)
    assert token_setting(tmp_path / "demo", "eos_token_id") == (0,)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    torch_model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    shown: list[str] = []
    text = "def main("
    result = generate(tmp_path / "demo", texts=(text,), max_new_tokens=30, on_text=shown.append)
    given = tokenizer(text, return_tensors="pt")
    want = torch_model.generate(**given, max_new_tokens=30, do_sample=False)
    assert result.rows[0].ids == tuple(want[0, given["input_ids"].shape[1] :].tolist())
    assert "".join(shown) == result.rows[0].text
    write = pipeline(
        "text-generation",
        model=ArtifactForCausalLM.from_artifact(tmp_path / "demo"),
        tokenizer=tokenizer,
    )
    (written,) = write(text, max_new_tokens=30, do_sample=False)
    assert written["generated_text"] == text + str(result.rows[0].text)
