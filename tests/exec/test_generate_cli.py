"""`kairox generate`: text as it comes, what it took, and bad input with exit code 2."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kairox_exec.generation import Generated, TextStream, generate, stop_tokens
from kairox_exec.runner import Runner
from kairox_exec.text import load_tokenizer
from kairox_sim.cli import main
from kairox_sim.settings import Settings

Capture = pytest.CaptureFixture[str]
PROMPT = "The old house"
EMULATED = ["--device", "emulated", "--emulate", "emu-pc1", "--as", "prosparse-7b"]


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
def command(tiny_reglu_dir: Path) -> list[object]:
    return ["generate", "--model", tiny_reglu_dir, "--prompt", PROMPT, "--max-new-tokens", 20]


def test_json_has_the_text_and_what_it_took(command: list[object], capsys: Capture) -> None:
    kairox(*command, "--policy", "tam", "--controller", "anb", "--slots", 300, "--json")
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    summary, totals = said["summary"], said["totals"]
    assert (said["new_tokens"], said["stopped"]) == (20, False)
    assert summary["n_decode"] == 19  # the first token comes out of the prefill
    assert summary["tok_s"] > 0
    assert summary["ttft_s"] > 0
    assert 0 < summary["recall"] < 1
    assert totals["evaluated"] == totals["hit_on_time"] + totals["residual"] > 0
    parts = ("used", "wasted", "cancelled", "unused_yet")
    assert totals["loads"] == sum(totals[part] for part in parts) > 0
    assert 0.4 <= said["threshold_scale"] <= 2.0
    assert said["labels"]["time"] == "measured"
    assert said["settings"]["controller"] == "anb"


def test_text_is_streamed_and_a_table_follows(command: list[object], capsys: Capture) -> None:
    kairox(*command, "--json", "--seed", 3)
    text = json.loads(capsys.readouterr().out)["text"]
    kairox(*command, "--seed", 3)
    shown = capsys.readouterr().out
    assert shown.startswith(text + "\n")
    for part in (
        "tok_s",
        "hit_on_time",
        "h2d_bytes_per_token",
        "threshold_scale",
        "measured",
        "of 896 neurons of a layer resident",
    ):
        assert part in shown
    assert "tok_s_scaled" not in shown  # no stand-in
    kairox(*command, "--json", "--seed", 4)
    assert json.loads(capsys.readouterr().out)["text"] != text


def test_text_does_not_depend_on_what_is_resident(tiny_reglu_dir: Path) -> None:
    texts = {
        generate(tiny_reglu_dir, PROMPT, settings, max_new_tokens=24, device="cpu").text
        for settings in (
            Settings(policy="all"),
            Settings(policy="none"),
            Settings(policy="lru", slots=60),
            Settings(policy="tam", slots=60),
        )
    }
    assert len(texts) == 1


def test_settings_file_and_overrides(
    command: list[object], tmp_path: Path, capsys: Capture
) -> None:
    Settings(policy="lru", slots=64, swap_neurons=8).dump(tmp_path / "best.toml")
    kairox(*command, "--settings", tmp_path / "best.toml", "--set", "late=stall", "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["provenance"]["slots"] == [64] * 6
    assert (said["settings"]["late"], said["settings"]["swap_neurons"]) == ("stall", 8)


def test_an_emulated_machine_is_named(command: list[object], capsys: Capture) -> None:
    kairox(*command, *EMULATED, "--policy", "lru", "--time-scale", 5, "--json")
    said = json.loads(capsys.readouterr().out)
    labels, summary = said["labels"], said["summary"]
    assert labels["time"] == "emulated"
    assert labels["hardware"] == "emu-pc1, slowed 5 x"
    assert labels["costs"] == "stand-in: tiny-reglu activations, prosparse-7b costs"
    assert summary["tok_s_scaled"] == pytest.approx(summary["tok_s"] * 6 / 32)
    # Paced: six layers of attention alone take 0.34 ms x 5 each.
    assert summary["tpot_s"] > 6 * 5 * 0.34e-3


def test_an_interrupt_reports_what_there_is(
    command: list[object], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    whole = Runner.generate

    def stopped(self: Runner, *args: Any, **given: Any) -> Iterator[Any]:
        for n, pair in enumerate(whole(self, *args, **given)):
            if n == 5:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(Runner, "generate", stopped)
    kairox(*command, "--json", code=130)
    said = json.loads(capsys.readouterr().out)
    assert (said["new_tokens"], said["stopped"]) == (5, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt-file", "x"], "either --prompt or --prompt-file"),
        (["--prompt", ""], "the prompt is empty"),
        (["--settings", "none.toml"], "cannot read the settings file"),
        (["--policy", "lru", "--controller", "anb"], "nothing in common"),
        (["--slots", "density"], "there is none; give --prior"),
        (["--gating", "predicted"], "rank with a --predictor-file"),
        (["--gating", "dense"], "cannot be run live yet"),
        (["--device", "emulated"], "needs a profile to emulate"),
        (["--emulate", "pc1"], "emulate is for the emulated device"),
        (["--set", "betta=1"], "did you mean"),
        (["--top-p", 0], "top_p must be in (0, 1]"),
        (["--model", "nowhere"], "there is no folder"),
        ([*EMULATED, "--time-scale", 0], "time_scale is 0"),
        ([*EMULATED, "--link", "pcie9"], "no link profile 'pcie9'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_bad_input(
    command: list[object], capsys: Capture, arguments: list[object], said: str
) -> None:
    kairox(*command, *arguments, code=2)
    message = capsys.readouterr().err
    assert said in message
    assert message.startswith("kairox: ")
    assert message.count("\n") == 1


def test_a_prompt_from_a_file_counts_as_typed(
    command: list[object], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "p.txt").write_text(PROMPT, encoding="utf-8")
    kairox(*command, "--json")
    typed = json.loads(capsys.readouterr().out)["text"]
    kairox(*command[:3], "--prompt-file", tmp_path / "p.txt", *command[5:], "--json")
    assert json.loads(capsys.readouterr().out)["text"] == typed


def test_characters_are_held_back_until_they_are_whole(tiny_reglu_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_reglu_dir)
    text = "naïve 🙂 ßß — x"
    stream = TextStream(tokenizer)
    pieces = [stream.add(int(token)) for token in tokenizer.encode(text)]
    assert "" in pieces  # some bytes had to wait
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) + stream.end() == text
    cut = TextStream(tokenizer)
    half = tokenizer.encode("🙂")[:-1]
    assert len(half) > 0
    assert "".join(cut.add(int(token)) for token in half) == ""
    assert "�" in cut.end()


def test_stop_tokens_of_a_config() -> None:
    class Config:
        eos_token_id: Any = None

    for given, expected in ((None, ()), (2, (2,)), ([2, 5], (2, 5))):
        Config.eos_token_id = given
        assert stop_tokens(Config()) == expected
    assert stop_tokens(object()) == ()


def test_the_public_api_is_lazy_and_whole() -> None:
    import kairox_exec

    assert kairox_exec.generate is generate
    assert dir(kairox_exec) == sorted(kairox_exec.__all__)
    for name in kairox_exec.__all__:
        assert callable(getattr(kairox_exec, name))
    assert Generated.__dataclass_params__.frozen
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        kairox_exec.lode  # noqa: B018
