"""`kairox record`: tables and JSON, files and prompts, and bad input with exit code 2."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kairox_exec.recorder import Recorder
from kairox_sim.calllog import read_call_log, rebuild, replay
from kairox_sim.cli import main
from kairox_sim.settings import Settings, make_controller, make_policy
from kairox_sim.trace import read_trace

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kairox(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    assert (ended.value.code or 0) == code


@pytest.fixture
def command(tiny_reglu_dir: Path, tmp_path: Path) -> list[object]:
    return ["record", "--model", tiny_reglu_dir, "-o", tmp_path / "t.arrow"]


def _json(capsys: Capture) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_files_in_sequence_are_domains(
    command: list[object], prompts_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    texts = ["--text", prompts_dir / "json.txt", prompts_dir / "prose.txt"]
    kairox(*command, *texts, "--tokens", 48, "--threads", 1, "--json")
    said = _json(capsys)
    assert [(row["domain"], row["tokens"]) for row in said["domains"]] == [
        ("json", 48),
        ("prose", 48),
    ]
    assert said["tokens"] == 96
    assert said["steps"] == 2 * (1 + 16)
    assert said["sha256"] == read_trace(tmp_path / "t.arrow", strict=True).sha256
    recall = [row["recall"] for row in said["prediction_by_layer"]]
    assert recall[0] is None  # nothing precedes layer 0: unknown, not 0
    assert all(0.3 < value <= 1 for value in recall[1:])
    assert all(0 < value < 1 for value in said["density_by_layer"])
    assert 0 < said["recorder_overhead"] < 1
    assert said["warnings"] == []


def test_table_says_where_it_is_and_what_it_cost(
    command: list[object], prompts_dir: Path, capsys: Capture
) -> None:
    kairox(*command, "--text", prompts_dir / "code.txt", "--tokens", 40)
    said = capsys.readouterr().out
    for part in ("code", "t.arrow: 0.0", "of the steps' time", "look-ahead at attn_out"):
        assert part in said


def test_prompts_are_written_on_from_by_sampling(
    command: list[object], tmp_path: Path, capsys: Capture
) -> None:
    rows = [{"prompt": "The old house", "domain": "prose"}, {"prompt": "x = 1", "domain": "code"}]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    kairox(*command, "--prompts", prompts, "--tokens", 30, "--seed", 4, "--json")
    said = _json(capsys)
    first = read_trace(tmp_path / "t.arrow", strict=True)
    assert [row["generated"] for row in said["domains"]] == [True, True]
    for info in first.header.sequences:
        mine = first.select(seqs=[info.seq])
        n_prompt = info.token_stop - info.token_start
        assert mine.n_tokens == n_prompt + 30  # every written token is fed, and so recorded
        assert int((mine.phase == 0).sum()) == n_prompt * first.header.n_layers
    kairox(*command, "--prompts", prompts, "--tokens", 30, "--seed", 4, "--force")
    assert read_trace(tmp_path / "t.arrow").sha256 == first.sha256
    kairox(*command, "--prompts", prompts, "--tokens", 30, "--seed", 5, "--force")
    assert read_trace(tmp_path / "t.arrow").sha256 != first.sha256


def test_nothing_but_a_prefill(command: list[object], prompts_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a prompt that nothing follows", encoding="utf-8")
    kairox(*command, "--prompts", tmp_path / "short.txt", "--tokens", 0)
    trace = read_trace(tmp_path / "t.arrow", strict=True)
    (info,) = trace.header.sequences
    assert trace.n_tokens == info.token_stop > 0
    assert set(trace.phase.tolist()) == {0}


def test_greedy_text_is_reported_as_a_loop(
    command: list[object], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "p.txt").write_text("1, 1, 1, 1, 1, 1, 1, 1, 1,", encoding="utf-8")
    arguments = [*command, "--prompts", tmp_path / "p.txt", "--tokens", 120]
    kairox(*arguments, "--temperature", 0)
    assert "warning: the trace is a loop" in capsys.readouterr().err


def test_a_layer_without_activity_is_flagged(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    from safetensors.torch import load_file, save_file

    model = tmp_path / "silent"
    shutil.copytree(tiny_reglu_dir, model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.3.mlp.gate_proj.weight"].zero_()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "t.arrow"
    text = prompts_dir / "prose.txt"
    kairox("record", "--model", model, "--text", text, "--tokens", 40, "-o", out, "--json")
    said = _json(capsys)
    assert said["density_by_layer"][3] == 0
    assert said["prediction_by_layer"][3]["recall"] is None
    assert any("layers that never fired: 3" in text for text in said["warnings"])


def test_a_run_under_a_policy_with_its_call_log(
    command: list[object], prompts_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "calls.arrow"
    text = ["--text", prompts_dir / "math.txt", "--tokens", 44]
    kairox(*command, *text, "--policy", "lru", "--slots", 90, "--call-log", log)
    trace = read_trace(tmp_path / "t.arrow", strict=True)
    assert trace.header.capacities == (90,) * 6
    header, events = read_call_log(log)
    settings = Settings.of(header["settings"])
    cache = rebuild(header, make_policy(settings, 6, 896), make_controller(settings))
    result = replay(events, cache)
    assert result.differences == []
    assert result.swaps > 0
    # The same tokens fire the same neurons, whatever was resident.
    everything = tmp_path / "all.arrow"
    kairox(*command[:3], "-o", everything, *text)
    assert (read_trace(everything).bits == trace.bits).mean() > 0.9999


def test_a_run_on_an_emulated_machine_says_so(
    command: list[object], prompts_dir: Path, tmp_path: Path
) -> None:
    how = ["--device", "emulated", "--emulate", "emu-pc1", "--as", "prosparse-7b"]
    text = ["--text", prompts_dir / "math.txt", "--tokens", 36]
    kairox(*command, *text, *how, "--time-scale", 6)
    header = read_trace(tmp_path / "t.arrow", strict=True).header
    assert header.hardware["emulated"] == "emu-pc1"
    assert header.hardware["time_scale"] == 6
    assert header.predicted_trigger == "attn_out"


def test_a_plain_run_is_recorded(
    command: list[object], prompts_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    text = ["--text", prompts_dir / "math.txt", prompts_dir / "code.txt", "--tokens", 40]
    kairox(*command, *text, "--run", "plain", "--batch", 2, "--json")
    told = capsys.readouterr()
    assert "--batch 2: 40 tokens of a text in windows of 256 are 1 to feed side by side" in told.err
    said = json.loads(told.out)
    assert (said["tokens"], said["predicted_trigger"]) == (80, None)
    header = read_trace(tmp_path / "t.arrow", strict=True).header
    assert header.run["kind"] == "plain"
    assert [s.domain for s in header.sequences] == ["math", "code"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "plain", "--policy", "lru", "--slots", 9], "--slots, --policy with --run plain"),
        (["--run", "plain", "--device", "tpu"], "a plain run is on auto, cpu, cuda"),
        (["--run", "plain", "--batch", 0], "batch 0: it must be 1 or more"),
        (["--run", "dense"], "unknown run 'dense'; allowed: hybrid, plain"),
        (["--batch", 2], "--batch needs --run plain"),
    ],
)
def test_what_a_plain_run_is_not(
    command: list[object],
    prompts_dir: Path,
    tmp_path: Path,
    capsys: Capture,
    arguments: list[object],
    said: str,
) -> None:
    kairox(*command, "--text", prompts_dir / "math.txt", *arguments, code=2)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "t.arrow").exists()


def test_ctrl_c_seals_and_exits_130(
    command: list[object],
    prompts_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    whole = Recorder.end_step

    def end_step(self: Recorder, step: Any) -> None:
        whole(self, step)
        if self.n_steps == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "end_step", end_step)
    kairox(*command, "--text", prompts_dir / "prose.txt", code=130)
    assert f"the first 51 tokens are in {tmp_path / 't.arrow'}" in capsys.readouterr().err
    trace = read_trace(tmp_path / "t.arrow")
    assert (trace.n_tokens, trace.truncated_at) == (51, 51)


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "of text files that the model reads, or of prompts"),
        (["--text", "prose.txt", "--prompts", "prose.txt"], "got 1 texts and 1 prompts files"),
        (["--text", "prose.txt", "--tokens", 10**6], "Give a longer text, or at most tokens"),
        (["--text", "prose.txt", "--tokens", 20], "prefill 32 uses up"),
        (["--text", "prose.txt", "--tokens", 6000, "--window", 5000], "context holds 4096"),
        (["--text", "none.txt"], "cannot read"),
        (["--prompts", "bad.jsonl"], "line 2: not JSON"),
        (["--prompts", "prose.txt", "--temperature", -1], "temperature must be 0 or more"),
        (["--text", "prose.txt", "--slots", 9], "--slots without a policy"),
        (["--text", "prose.txt", "--policy", "lfru"], "did you mean"),
        (["--text", "prose.txt", "--policy", "lru", "--controller", "anb"], "nothing in common"),
        (["--text", "prose.txt", "--policy", "static"], "needs a prior"),
        (["--text", "prose.txt", "--gating", "predicted"], "rank with a --predictor-file"),
        (["--text", "prose.txt", "--gating", "dense"], "cannot be run live yet"),
        (["--text", "prose.txt", "--threads", 0], "threads must be 1 to"),
        (["--text", "prose.txt", "--trigger", "sometimes"], "trigger"),
        (["--text", "prose.txt", "-o", "nowhere/t.arrow"], "there is no folder"),
        (["--text", "prose.txt", "--model", "nowhere"], "does not exist"),
        (["--text", "prose.txt", "--model", "silu"], "'silu'"),
        (["--text", "prose.txt", "--model", "broken"], "header is not safetensors"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_bad_input(
    command: list[object],
    prompts_dir: Path,
    tiny_reglu_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    arguments: list[object],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(prompts_dir / "prose.txt", tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "domain": "b"}\n{oops\n')
    for name in ("silu", "broken"):
        shutil.copytree(tiny_reglu_dir, tmp_path / name)
    config = json.loads((tiny_reglu_dir / "config.json").read_text())
    (tmp_path / "silu" / "config.json").write_text(json.dumps(config | {"hidden_act": "silu"}))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\0" * 64)
    kairox(*command, *arguments, code=2)
    message = capsys.readouterr().err
    assert said in message
    assert message.startswith("kairox: ")
    assert message.count("\n") == 1
    assert not (tmp_path / "t.arrow").exists()


def test_a_prior_that_has_seen_the_text_is_refused(
    command: list[object], prompts_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    text = ["--text", prompts_dir / "prose.txt", "--tokens", 40]
    kairox(*command, *text)
    again = [*command[:3], "-o", tmp_path / "u.arrow", "--policy", "static", "--slots", 50]
    prior = ["--prior", tmp_path / "t.arrow"]
    kairox(*again, *text, *prior, code=2)
    assert "overlaps the tokens" in capsys.readouterr().err
    assert not (tmp_path / "u.arrow").exists()
    kairox(*again, *text, *prior, "--skip", 40)  # other tokens of the same text are fine


def test_an_existing_file_is_not_overwritten(
    command: list[object], prompts_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "t.arrow").write_bytes(b"precious")
    kairox(*command, "--text", prompts_dir / "prose.txt", code=2)
    assert "exists; name another file, or overwrite it with --force" in capsys.readouterr().err
    assert (tmp_path / "t.arrow").read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["record", "generate"])
def test_without_torch_it_says_what_to_install(name: str) -> None:
    blocked = "import sys; sys.modules['torch'] = None\nfrom kairox_sim.cli import main\nmain()"
    given = ["--model", "m"] + (["-o", "t"] if name == "record" else ["--prompt", "x"])
    ended = subprocess.run(
        [sys.executable, "-c", blocked, name, *given], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "needs torch, of the extra `exec`" in ended.stderr
    assert 'pip install -e ".[exec]"' in ended.stderr
