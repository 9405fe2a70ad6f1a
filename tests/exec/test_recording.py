"""record(): what a header says, what a killed or stopped run leaves, what is never overwritten."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kairox_exec.loading import model_sha256
from kairox_exec.machine import machine_facts
from kairox_exec.recorder import Recorder
from kairox_exec.recording import record
from kairox_sim.errors import KairoxError
from kairox_sim.machine_facts import gpu_facts
from kairox_sim.settings import Settings
from kairox_sim.simulation import simulate
from kairox_sim.trace import read_trace


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_header_says_what_was_recorded(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    texts = [prompts_dir / "code.txt", prompts_dir / "math.txt"]
    out = record(
        tiny_reglu_dir, texts, tmp_path / "t.arrow", tokens=50, skip=7, prefill=4, window=25
    )
    header = read_trace(out, strict=True).header
    assert header.model == "tiny-reglu"
    assert header.model_sha256 == model_sha256(tiny_reglu_dir)
    assert (header.complete, header.gating, header.capacities) == (True, "exact", ())
    spans = [(s.seq, s.domain, s.token_start, s.token_stop) for s in header.sequences]
    assert spans == [
        (0, "code", 7, 32), (1, "code", 32, 57), (2, "math", 7, 32), (3, "math", 32, 57),
    ]  # fmt: skip
    assert header.hardware["device"] == "cpu"
    began, ended = header.hardware["gpus"], header.hardware["gpus_at_end"]
    assert (began is None) == (ended is None)
    assert len(began or ()) == len(ended or ())
    assert header.run == {
        "kind": "hybrid", "dtype": "float32", "weights": "float32", "numerics": "fast",
    }  # fmt: skip
    assert 0 < header.recorder_overhead < 1


def test_a_lossy_recording_says_so_and_is_simulated_as_it_ran(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    lossy = Settings(
        policy="lru", slots=100, gating="predicted", predictor="lookahead", trigger="attn_out"
    )
    out = record(
        tiny_reglu_dir, prompts_dir / "code.txt", tmp_path / "t.arrow",
        tokens=12, prefill=4, settings=lossy,
    )  # fmt: skip
    trace = read_trace(out, strict=True)
    assert (trace.header.gating, trace.header.complete) == ("predicted", False)
    assert trace.header.approximate is None
    assert trace.evaluated_bits is not None
    again = simulate(trace, lossy)
    assert not again.steps["exact"].any()
    assert again.steps["active"].isna().all()  # what was not computed may have fired
    last = trace.at(trace.n_steps - 1)
    evaluated = sum(last.evaluated(layer).size for layer in range(trace.header.n_layers))
    assert again.steps["evaluated"].iloc[-1] == evaluated > 0


def test_header_says_how_rows_are_stored_and_summed(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    how = Settings(policy="all", gating="screened", weights="int8", numerics="deterministic")
    text = prompts_dir / "code.txt"
    out = record(tiny_reglu_dir, text, tmp_path / "t.arrow", tokens=24, prefill=8, settings=how)
    header = read_trace(out, strict=True).header
    assert (header.gating, header.complete) == ("screened", True)
    assert (header.run["weights"], header.run["numerics"]) == ("int8", "deterministic")


# -- a run that ends early ----------------------------------------------------------------------

_SCRIPT = """
import sys
from kairox_exec.recording import record
record(sys.argv[1], sys.argv[2], sys.argv[3], tokens=2000, prefill=0,
       progress=lambda done, total: print(done, flush=True))
"""


@pytest.mark.slow
def test_a_killed_recording_keeps_every_acknowledged_batch(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed.arrow"
    arguments = [tiny_reglu_dir, prompts_dir / "prose.txt", out]
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        done = next(int(line) for line in process.stdout if int(line) >= 29)
        process.kill()  # SIGKILL: nothing gets to clean up
    trace = read_trace(out)
    acknowledged = done - done % 8  # a batch of 8 one-token steps is on the disk before the next
    assert trace.truncated_at == trace.n_tokens >= acknowledged > 0
    assert trace.n_tokens < 2000
    assert any("truncated at token" in text for text in trace.warnings)
    with pytest.raises(KairoxError, match="truncated"):
        read_trace(out, strict=True)


def _stop_at(n_tokens: int, error: type[BaseException]) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done >= n_tokens:
            raise error("stopped here")

    return progress


def test_an_interrupt_seals_what_there_is(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t.arrow"
    with pytest.raises(KeyboardInterrupt, match=r"the first 41 tokens are in .*t\.arrow"):
        record(
            tiny_reglu_dir, prompts_dir / "prose.txt", out, tokens=60,
            progress=_stop_at(41, KeyboardInterrupt),
        )  # fmt: skip
    trace = read_trace(out)
    assert trace.truncated_at == trace.n_tokens == 41
    assert out.read_bytes().startswith(b"ARROW1")  # a file every tool opens
    assert 0 < trace.header.recorder_overhead < 1


def test_an_error_keeps_the_steps_before_it(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    out, text = tmp_path / "t.arrow", prompts_dir / "prose.txt"
    with pytest.raises(KairoxError, match=r"stopped here\. The 40 tokens before it are in"):
        record(tiny_reglu_dir, text, out, tokens=60, progress=_stop_at(40, KairoxError))
    assert read_trace(out).truncated_at == 40


@pytest.mark.parametrize("error", [KeyboardInterrupt, KairoxError])
def test_a_run_that_never_began_leaves_nothing(
    tiny_reglu_dir: Path,
    prompts_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    def fail(*args: object) -> None:
        raise error("at once")

    monkeypatch.setattr(Recorder, "__call__", fail)
    with pytest.raises(error, match="othing was recorded"):
        record(tiny_reglu_dir, prompts_dir / "prose.txt", tmp_path / "t.arrow", tokens=60)
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_only_by_something_whole(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    out, text = tmp_path / "t.arrow", prompts_dir / "prose.txt"
    record(tiny_reglu_dir, text, out, tokens=34)
    before = read_trace(out).sha256
    with pytest.raises(KairoxError, match="exists"):
        record(tiny_reglu_dir, text, out, tokens=40)
    with pytest.raises(KairoxError, match="stopped here"):
        record(tiny_reglu_dir, text, out, tokens=60, force=True, progress=_stop_at(40, KairoxError))
    assert read_trace(out).sha256 == before
    left = tmp_path / "t.arrow.recording"
    assert read_trace(left).truncated_at == 40
    with pytest.raises(KairoxError, match="did not end; rename it to keep it"):
        record(tiny_reglu_dir, text, out, tokens=40, force=True)
    left.unlink()
    record(tiny_reglu_dir, text, out, tokens=40, force=True)
    assert read_trace(out, strict=True).n_tokens == 40
    assert [path.name for path in tmp_path.iterdir()] == ["t.arrow"]


# -- the machine --------------------------------------------------------------------------------


class _Nvml:
    """One GPU that does not say everything."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        known: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetName": b"Test GPU",
            "nvmlSystemGetDriverVersion": "550.1",
            "nvmlDeviceGetPowerUsage": 61_500,
            "nvmlDeviceGetCurrPcieLinkGeneration": 4,
        }

        def answer(*args: object) -> Any:
            if name not in known:
                raise self.NVMLError(name)
            return known[name]

        return answer


def test_gpu_facts_are_null_where_the_driver_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Nvml())
    (gpu,) = gpu_facts() or []
    assert gpu["name"] == "Test GPU"
    assert gpu["power_w"] == 61.5
    assert gpu["pcie_generation"] == 4
    silent = {"memory_bytes", "busy_share", "sm_hz", "celsius", "power_limit_w", "pcie_lanes"}
    assert {key for key in silent if gpu[key] is None} == silent


def test_no_driver_is_unknown_rather_than_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import fails
    assert gpu_facts() is None
    facts = machine_facts()
    assert facts["gpus"] is None
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["memory_bytes"] > 0
    assert 0 not in (facts["cpu"]["cores"], facts["cpu"]["max_hz"], facts["cpu"]["threads"])
