"""Tiny random Hugging Face checkpoints: traced graph = eager torch, weights stay on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from subquad.converter import huggingface, weights
from subquad.converter.emit import write_models
from subquad.converter.source import trace
from subquad.converter.source_hash import hash_files
from subquad.converter.traced import TracedModel
from subquad.converter.weights import is_lazy
from subquad.runtime.errors import UnsupportedModelError, UsageError

GAIN = 5.0  # the default initialisation is so flat that a wrong attention would not show
SIZES = ((1, 1), (3, 7), (2, 65))


@dataclass
class Case:
    """A saved checkpoint, the same model in eager torch, and what tracing made of it."""

    folder: Path
    eager: Any
    traced: TracedModel
    artifact: Path
    files: dict[str, dict[str, Any]]

    def run(self, inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(str(self.artifact / "model.onnx"))
        return list(session.run(None, {name: value.numpy() for name, value in inputs.items()}))


@pytest.fixture(scope="module", autouse=True)
def empty_every_parameter() -> Iterator[None]:
    """Treat these tiny parameters as the large ones of real models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "_WORTH_RELEASING", 1)
        yield


def _enlarge(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(GAIN)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _case(folder: Path, eager: torch.nn.Module) -> Case:
    artifact = folder / "artifact"
    artifact.mkdir()
    traced = trace(folder)
    models = {"model.onnx": traced.model, "reference.onnx": traced.reference}
    files = write_models(artifact, models)
    return Case(folder, eager.eval(), traced, artifact, files)


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Grouped queries, tied embeddings, bfloat16 in shards, no class named in the config."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=72,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    _enlarge(model)
    folder = tmp_path_factory.mktemp("llama")
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    _edit_config(folder, architectures=None)
    assert (folder / "model.safetensors.index.json").is_file()
    (folder / "tokenizer.json").write_text("{}")
    # Loaded anew: the round trip through bfloat16 rounded the rotary frequencies as well.
    eager = transformers.LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", use_cache=False
    )
    yield _case(folder, eager)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """An encoder read from a masked-LM checkpoint: its pooler was never trained."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=300,
        hidden_size=60,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=80,
        max_position_embeddings=96,
        attn_implementation="eager",
    )
    model = transformers.BertForMaskedLM(config)
    _enlarge(model)
    folder = tmp_path_factory.mktemp("bert")
    model.save_pretrained(folder)
    _edit_config(folder, architectures=["BertModel"])
    yield _case(folder, model.bert)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=60,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=80,
        image_size=24,
        patch_size=6,
        num_labels=4,
        attn_implementation="eager",
    )
    model = transformers.ViTForImageClassification(config)
    _enlarge(model)
    folder = tmp_path_factory.mktemp("vit")
    model.save_pretrained(folder)
    yield _case(folder, model)


def _text(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    if batch > 1:
        mask[0, (length + 1) // 2 :] = 0
    ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": mask}


def _assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """float32 through two sharp layers; a 1 % error of the attention scale gives over 1e-2."""
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)


def test_llama_equals_eager(llama: Case) -> None:
    for batch, length in SIZES:
        inputs = _text(batch, length, 320)
        with torch.no_grad():
            want = llama.eager(**inputs).logits.numpy()
        real = inputs["attention_mask"].numpy().astype(bool)
        _assert_close(llama.run(inputs)[0][real], want[real])


def test_bert_equals_eager(bert: Case) -> None:
    for batch, length in SIZES:
        inputs = _text(batch, length, 300)
        inputs["token_type_ids"] = (inputs["input_ids"] % 2).to(torch.int64)
        with torch.no_grad():
            want = bert.eager(**inputs).last_hidden_state.numpy()
        real = inputs["attention_mask"].numpy().astype(bool)
        _assert_close(bert.run(inputs)[0][real], want[real])


def test_vit_equals_eager(vit: Case) -> None:
    for batch in (1, 3):
        pixels = torch.randn(batch, 3, 24, 24, generator=torch.Generator().manual_seed(batch))
        with torch.no_grad():
            want = vit.eager(pixel_values=pixels).logits.numpy()
        got = vit.run({"pixel_values": pixels})[0]
        _assert_close(got, want)


def test_signatures(llama: Case, bert: Case, vit: Case) -> None:
    def described(case: Case) -> list[tuple[Any, ...]]:
        return [(s.name, s.role, s.high, s.shape, s.dtype) for s in case.traced.inputs]

    sequence = ("batch", "length")
    assert described(llama) == [
        ("input_ids", "token_ids", 320, sequence, "int64"),
        ("attention_mask", "padding_mask", None, sequence, "int64"),
    ]
    assert described(bert) == [
        ("input_ids", "token_ids", 300, sequence, "int64"),
        ("attention_mask", "padding_mask", None, sequence, "int64"),
        ("token_type_ids", "ids", 2, sequence, "int64"),
    ]
    assert described(vit) == [
        ("pixel_values", "values", None, ("batch", 3, 24, 24), "float32"),
    ]
    outputs = [(o.name, o.is_logits, o.shape) for o in llama.traced.outputs]
    assert outputs == [("logits", True, ("batch", "length", 320))]
    outputs = [(o.name, o.is_logits, o.shape) for o in vit.traced.outputs]
    assert outputs == [("logits", False, ("batch", 4))]


def test_untrained_outputs_are_dropped(bert: Case) -> None:
    """The checkpoint has no pooler; transformers would fill it with random numbers."""
    assert [(o.name, o.shape) for o in bert.traced.outputs] == [
        ("last_hidden_state", ("batch", "length", 60))
    ]
    assert not any("pooler" in name for name in bert.traced.model.graph.initializers)


def test_attention_arrives_as_one_node(llama: Case, bert: Case, vit: Case) -> None:
    for case in (llama, bert, vit):
        kinds = [node.op_type for node in case.traced.model.graph]
        assert kinds.count("Attention") == 2
        assert case.traced.model.opset_imports == {"": 24}
        assert not case.traced.model.functions


def test_weights_are_lazy(llama: Case, bert: Case, vit: Case) -> None:
    for case in (llama, bert, vit):
        for name, value in case.traced.model.graph.initializers.items():
            tensor = value.const_value
            assert tensor is not None
            if tensor.size >= 1000:
                assert is_lazy(tensor), f"{name} is in memory"


def test_tied_embedding_is_stored_once(llama: Case) -> None:
    """Gather needs W, the head W^T: one copy in the file and a Transpose for the runtime."""
    graph = llama.traced.model.graph
    (embedding,) = (v for v in graph.initializers.values() if tuple(v.shape or ()) == (320, 72))
    users = sorted(node.op_type for node, _ in embedding.uses())
    assert users == ["Gather", "Transpose"]
    weights_once = sum(p.numel() for p in llama.eager.parameters()) * 4
    assert llama.files["model.onnx.data"]["size"] < weights_once + 64 * 1024


def test_no_node_transposes_an_untied_weight(bert: Case) -> None:
    for node in bert.traced.model.graph:
        if node.op_type == "Transpose":
            assert node.inputs[0] is not None and not node.inputs[0].is_initializer()


def test_companions_and_names(llama: Case) -> None:
    names = [path.name for path in llama.traced.companions]
    assert "tokenizer.json" in names and "config.json" in names
    assert not any(name.endswith(".safetensors") for name in names)
    assert not any("index.json" in name for name in names)
    assert llama.traced.kind == "huggingface"
    assert "/" not in llama.traced.source_name
    assert llama.traced.max_length == 128


def test_hash_follows_config_and_weights_only(bert: Case) -> None:
    def current() -> str:
        checkpoint = weights.open_checkpoint(bert.folder)
        return hash_files(huggingface.source_files(bert.folder, checkpoint))

    assert current() == bert.traced.source_hash
    (bert.folder / "README.md").write_text("changed")
    assert current() == bert.traced.source_hash
    config = (bert.folder / "config.json").read_text()
    (bert.folder / "config.json").write_text(config + " ")
    assert current() != bert.traced.source_hash
    (bert.folder / "config.json").write_text(config)


# ---- folders that are refused


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A complete folder, cheap to save."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    return tmp_path


def test_pickled_weights_are_never_read(small: Path) -> None:
    (small / "model.safetensors").rename(small / "kept")
    (small / "pytorch_model.bin").write_bytes(b"\x80\x04not even a pickle")
    with pytest.raises(UnsupportedModelError, match="save_pretrained writes safetensors"):
        trace(small)


def test_no_weights_at_all(small: Path) -> None:
    (small / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="holds no .*safetensors"):
        trace(small)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no config.json"):
        trace(tmp_path)


def test_config_that_is_no_json(small: Path) -> None:
    (small / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="not valid JSON"):
        trace(small)


def test_remote_code_is_never_run(small: Path) -> None:
    (small / "evil.py").write_text("raise SystemExit('executed')")
    _edit_config(
        small,
        model_type="evil",
        auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},
    )
    with pytest.raises(UnsupportedModelError, match="its own code"):
        trace(small)


@pytest.mark.parametrize("name", ["EvilModel", "pipeline", "AutoModel", "logging"])
def test_unknown_class(small: Path, name: str) -> None:
    _edit_config(small, architectures=[name])
    with pytest.raises(UnsupportedModelError, match=name):
        trace(small)


def test_quantised_checkpoint(small: Path) -> None:
    _edit_config(small, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="gptq"):
        trace(small)


def test_checkpoint_of_another_size(small: Path) -> None:
    _edit_config(small, hidden_size=16)
    with pytest.raises(UnsupportedModelError, match="cannot load"):
        trace(small)


def test_checkpoint_that_lacks_what_every_output_needs(small: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(small / "model.safetensors")
    tensors.pop("embeddings.word_embeddings.weight")
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="lacks parameters"):
        trace(small)


def test_nothing_is_printed_or_logged(
    small: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        trace(small)
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert logging.root.manager.disable == logging.NOTSET
