from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import subquad
import tiny_artifact
from subquad.kernels.tuning.choose import TuningOptions
from subquad.runtime import errors
from tiny_artifact import Tiny, feeds, save_npz

Run = Callable[..., Result]

COMMAND = [sys.executable, "-m", "subquad"]
QUICK = ("--lengths", "9", "--threads", "1")


@dataclass(frozen=True)
class FakeReport:
    """What the pipeline returns, as far as the command line looks at it."""

    sites: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "source": {"kind": "onnx", "name": "m.onnx", "hash": "0"},
            "sites": list(self.sites),
            "rejections": [{"where": "softmax_3", "reason": "its mask [depends] on values"}],
            "seconds": {"trace": 1.0},
            "peak_rss_bytes": 1 << 20,
            "output": "out",
            "files": {},
            "kernels": {"asked": "none", "targets": [], "attentions": 0, "missing": ""},
        }


class FakePipeline:
    """Records the call; raises or returns what it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.calls: list[dict[str, Any]] = []

    def convert(self, source: str, output: Path, **options: Any) -> FakeReport:
        self.calls.append({"source": source, "output": output, **options})
        print("a library prints")
        options["progress"]("trace", None)
        if self.error is not None:
            raise self.error
        return FakeReport()

    def inspect_source(self, source: str, **options: Any) -> FakeReport:
        self.calls.append({"source": source})
        return FakeReport()


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    fake = FakePipeline()
    monkeypatch.setattr("subquad.commands.convert.load_pipeline", lambda: fake)
    return fake


def test_version(run: Run) -> None:
    assert run("--version").stdout.split() == ["subquad,", "version", subquad.__version__]


@pytest.mark.parametrize(
    "command", ["inspect", "convert", "validate", "bench", "run", "generate", "doctor", "tune"]
)
def test_every_command_has_help_with_an_example(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"subquad {command} " in result.stdout and "--json" in result.stdout


@pytest.mark.skipif(os.name != "posix", reason="resource usage")
def test_help_is_fast() -> None:
    # Processor time and the best of three: a busy machine must not fail it.
    seconds = []
    for _ in range(3):
        process = subprocess.Popen([*COMMAND, "--help"], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        seconds.append(usage.ru_utime + usage.ru_stime)
    assert min(seconds) < 0.3


def test_unknown_command_and_option(run: Run) -> None:
    assert run("transmogrify").exit_code == 2
    assert run("validate", "x", "--nope").exit_code == 2
    assert run("validate").exit_code == 2


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.UnsupportedModelError, 3),
        (errors.BudgetError, 4),
        (errors.ReplacementError, 5),
        (errors.TargetUnavailableError, 6),
        (errors.IntegrityError, 7),
        (errors.OutputError, 8),
        (errors.SubquadError, 3),
    ],
)
def test_errors_are_one_line_and_a_code(
    run: Run, pipeline: FakePipeline, kind: type[errors.SubquadError], code: int
) -> None:
    pipeline.error = kind("what failed,\nand [what] to do")
    result = run("convert", "m.onnx", "out", "--json")
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "error: what failed, and [what] to do"


def test_interrupted(run: Run, pipeline: FakePipeline) -> None:
    pipeline.error = KeyboardInterrupt()
    result = run("convert", "m.onnx", "out")
    assert result.exit_code == 130
    assert "interrupted; nothing was written" in result.stderr


def test_convert_passes_everything_on(run: Run, pipeline: FakePipeline) -> None:
    result = run(
        *("convert", "m.onnx", "out", "--force", "window:8@0-3", "--force", "elu@4"),
        *("--overwrite", "--require-sites", "all", "--allow-declined", "--strict-causal"),
        *("--kernels", "cpu", "--require-kernels", "--seed", "3", "--json"),
        *("--no-tuning", "--tuning-records", "r.jsonl", "--tuning-length", "512"),
        *("--target", "cuda:sm_90", "--cache"),
    )
    assert result.exit_code == 0, result.stderr
    (call,) = pipeline.calls
    call.pop("progress")
    assert call == {
        "source": "m.onnx",
        "output": Path("out"),
        "force": ("window:8@0-3", "elu@4"),
        "plan": None,
        "overwrite": True,
        "require_sites": "all",
        "allow_declined": True,
        "strict_causal": True,
        "kernels": "cpu",
        "require_kernels": True,
        "tuning": TuningOptions(False, (Path("r.jsonl"),), 512),
        "targets": ("cuda:sm_90",),
        "cache": True,
        "seed": 3,
    }
    # JSON alone on stdout, whatever libraries print
    assert json.loads(result.stdout)["output"] == "out"
    assert "a library prints" in result.stderr and "trace" in result.stderr


def test_sites_belong_to_the_one_force(run: Run, pipeline: FakePipeline) -> None:
    assert run("convert", "m", "out", "--force", "elu", "--sites", "0,2-5").exit_code == 0
    assert pipeline.calls[0]["force"] == ("elu@0,2-5",)
    for arguments in (
        ["--sites", "0"],
        ["--sites", "0", "--force", "elu", "--force", "window"],
        ["--sites", "0", "--force", "elu@1"],
    ):
        result = run("convert", "m", "out", *arguments)
        assert result.exit_code == 2 and result.stderr.startswith("error: ")


def test_tables_show_reasons_verbatim(run: Run, pipeline: FakePipeline) -> None:
    result = run("inspect", "m.onnx")
    assert "softmax_3: its mask [depends] on values" in result.stdout
    assert "no attention found" in result.stdout


def test_the_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['onnx_ir'] = None\nfrom subquad.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", "m.onnx"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install 'subquad[convert]'.")


def test_inspect_an_artifact(run: Run, decoder: Path) -> None:
    result = run("inspect", decoder)
    assert result.exit_code == 0
    assert "layers.2.attention" in result.stdout and "function body" in result.stdout
    content = json.loads(run("inspect", decoder, "--json").stdout)
    assert [site["method"] for site in content["sites"]] == ["dense"] * 3


def test_validate_passes(run: Run, decoder: Path) -> None:
    result = run("validate", decoder, *QUICK)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "PASS"
    assert "SYNTHETIC" in result.stdout and "warning: SYNTHETIC" in result.stderr


def test_validate_json(run: Run, decoder: Path) -> None:
    content = json.loads(run("validate", decoder, *QUICK, "--json", "--paddings", "none").stdout)
    assert content["verdict"] == "pass" and content["synthetic"]
    assert [case["padding"] for case in content["cases"]] == ["none"]


def test_validate_fails_with_exit_4_and_still_reports(run: Run, tmp_path: Path) -> None:
    folder = tiny_artifact.build(tmp_path / "bad", Tiny(perturbed=1))
    result = run("validate", folder, *QUICK, "--json", "--no-metamorphic")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["first_diverging"]["name"] == "layers.1.attention"
    assert "error: site layers.1.attention is exact" in result.stderr


def test_validate_budget(run: Run, tmp_path: Path) -> None:
    methods = ("dense", "window", "dense")
    folder = tiny_artifact.build(tmp_path / "it", Tiny(perturbed=1, methods=methods))
    arguments = ("validate", folder, *QUICK, "--no-metamorphic", "--no-attention")
    assert "MEASURED" in run(*arguments).stdout
    assert run(*arguments, "--budget", "kl=100", "--budget", "ppl=1000%").exit_code == 0
    assert run(*arguments, "--budget", "kl=0").exit_code == 4
    assert run(*arguments, "--budget", "speed=1").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--lengths", "a"], 2),
        (["--lengths", "0"], 2),
        (["--paddings", "up"], 2),
        (["--data", "nothing.txt"], 2),
        (["--provider", "fast"], 2),
        (["--threads", "0"], 2),
        (["--provider", "migraphx"], 6),
    ],
)
def test_validate_refuses(run: Run, decoder: Path, arguments: list[str], code: int) -> None:
    result = run("validate", decoder, *arguments)
    assert result.exit_code == code
    assert result.stdout == ""


def test_a_damaged_artifact_is_exit_7(run: Run, decoder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(decoder, tmp_path / "copy")
    (folder / "model.onnx.data").write_bytes(b"")
    for command in (["validate"], ["bench"], ["run", "--text", "w1"]):
        result = run(command[0], folder, *command[1:])
        assert result.exit_code == 7
        assert "model.onnx.data" in result.stderr
    assert run("validate", tmp_path).exit_code == 7
    assert run("validate", tmp_path / "none").exit_code == 2


def test_bench(run: Run, decoder: Path) -> None:
    arguments = ("bench", decoder, *QUICK, "--rounds", "2", "--no-memory", "--unchecked")
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "speed-up" in result.stdout and "GFLOP/s" in result.stdout
    content = json.loads(run(*arguments, "--json").stdout)
    assert content["cases"][0]["rounds"] == 2


def test_bench_costs(
    run: Run, decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))  # functions only: no kernel is compiled
    quick = ("--lengths", "8", "--threads", "1", "--rounds", "3")
    output = tmp_path / "costs.json"
    result = run("bench", "--costs", "--shapes", "2/1/4", *quick, "--output", output)
    assert result.exit_code == 0, result.stderr
    assert "C++ compiler" in result.stdout and output.exists()
    before = json.loads(output.read_text())["curves"]
    artifact = shutil.copytree(decoder, tmp_path / "artifact")
    manifest = json.loads((artifact / "manifest.json").read_text())
    for record in manifest["sites"]:  # as `convert` writes it
        record["site"]["proof"] = {"mask": "", "mask_probes": 0, "node_probes": 0, "max_error": 0.0}
    (artifact / "manifest.json").write_text(json.dumps(manifest))
    again = run("bench", "--costs", artifact, *quick, "--output", output, "--json")
    assert again.exit_code == 0, again.stderr
    content = json.loads(again.stdout)
    assert len(content["table"]["curves"]) > len(before)  # the file grows
    assert not (tmp_path / "cache" / "costs").exists()
    assert run("bench", "--costs", "--shapes", "2/1/4", *quick).exit_code == 0
    assert len(list((tmp_path / "cache" / "costs").iterdir())) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--costs", "--shapes", "2x1x4"],
        ["--costs", "--provider", "cuda"],
        ["--costs", "out", "--shapes", "2/1/4"],
        ["out", "--shapes", "2/1/4"],
        ["--costs", "--lengths", "0"],
    ],
)
def test_bench_costs_refuses(run: Run, arguments: list[str]) -> None:
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_run_text(run: Run, decoder: Path) -> None:
    result = run("run", decoder, "--text", "w1 w2", "--top", "2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("%") == 2
    content = json.loads(run("run", decoder, "--text", "w1 w2", "--json").stdout)
    assert len(content["summaries"][0]["next_tokens"]) == 5


def test_run_arrays(run: Run, decoder: Path, tmp_path: Path) -> None:
    save_npz(tmp_path / "x.npz", feeds())
    paths = ("--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    assert run("run", decoder, *paths).exit_code == 0
    assert (tmp_path / "y.npz").is_file()
    missing = ("--input", tmp_path / "x.npz", "--output", tmp_path / "no" / "y.npz")
    assert run("run", decoder, *missing).exit_code == 8
    assert run("run", decoder).exit_code == 2


def test_doctor(run: Run) -> None:
    assert run("doctor").exit_code == 0
    content = json.loads(run("doctor", "--json", "--require", "python").stdout)
    assert content["checks"][0]["name"] == "python"
    result = run("doctor", "--require", "gpu", "--require", "cpu provider")
    if "onnxruntime-gpu missing" in result.stdout.replace("\n", ""):
        assert result.exit_code == 6 and "gpu is required" in result.stderr
    assert run("doctor", "--require", "magic").exit_code == 2


def test_config_file_equals_the_flags(run: Run, pipeline: FakePipeline, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        '[convert]\nforce = ["elu@1", "window@2"]\nseed = 5\nallow-declined = true\n'
        'output = "from-file"\nsource = "m.onnx"\n[validate]\nlengths = [9]\n'
    )
    assert run("convert", "--config", config).exit_code == 0
    call = pipeline.calls[0]
    assert (call["source"], call["output"]) == ("m.onnx", Path("from-file"))
    assert call["force"] == ("elu@1", "window@2")
    assert (call["seed"], call["allow_declined"]) == (5, True)
    # a flag wins
    assert run("convert", "x.onnx", "out", "--seed", "6", "--config", config).exit_code == 0
    assert (pipeline.calls[1]["seed"], pipeline.calls[1]["source"]) == (6, "x.onnx")


def test_config_lists_and_single_values(run: Run, decoder: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        '[validate]\nlengths = [9]\npaddings = ["none"]\nbudget = "rel=1"\nthreads = 1\njson = true'
    )
    result = run("validate", decoder, "--config", config)
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert [(case["length"], case["padding"]) for case in content["cases"]] == [(9, "none")]
    assert content["budget"] == {"rel": 1.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[convert]\nsede = 1", "has no setting 'sede'"),
        ("[transmogrify]\n", "'transmogrify' is not one of the tables"),
        ("seed = 1", "'seed' is not one of the tables"),
        ("[convert", "c.toml"),
        ("[convert]\nseed = 'x'", "not a valid integer"),
        ("[convert]\nconfig = 'x'", "has no setting 'config'"),
        ("[validate]\nlengths = 3.5", "no comma-separated list"),
        ("[validate]\nlengths = [512.7]", "no comma-separated list"),
        ("[validate]\nlengths = [true]", "no comma-separated list"),
    ],
)
def test_bad_config(run: Run, tmp_path: Path, content: str, message: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(content)
    command = ["validate", "x"] if "validate" in content else ["convert", "m", "out"]
    result = run(*command, "--config", config)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_missing_config(run: Run, tmp_path: Path) -> None:
    assert run("convert", "m", "out", "--config", tmp_path / "none.toml").exit_code == 2


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_command(decoder: Path, tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [*COMMAND, "validate", str(decoder), "--rows", "500", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        # wait until it works: the first line of progress
        process.stderr.readline()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stdout == ""
    assert stderr.splitlines()[-1] == "interrupted; nothing was written"


@pytest.mark.skipif(os.name != "posix", reason="pipes")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_is_no_traceback(decoder: Path, options: list[str]) -> None:
    with subprocess.Popen(
        [*COMMAND, "inspect", str(decoder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        stderr = process.stderr.read()
        process.wait(timeout=30)
    assert "Traceback" not in stderr and "Exception" not in stderr
    assert process.returncode in (0, 1)


def test_codes_through_the_entry_point(decoder: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "run", str(decoder), "--text", "w1", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    done = subprocess.run([*COMMAND, "run", "nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
