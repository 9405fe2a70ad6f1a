"""The program: one message and exit code 2 for bad input, JSON that adds up, help with examples."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from toys import of_chunks, random_trace
from typer.testing import CliRunner

from kairox_sim import cli
from kairox_sim.cli import COMMANDS, app, main
from kairox_sim.commands.options import exec_extra
from kairox_sim.commands.sweep import MOST_ROWS, distinct_warnings, print_fastest
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import load_profile
from kairox_sim.metrics import AGAINST, METRICS, STEP_COLUMNS
from kairox_sim.model import CATALOGUE
from kairox_sim.record import APPROXIMATE, LOSSY
from kairox_sim.settings import Settings
from kairox_sim.sweeps import Sweep, expand
from kairox_sim.trace import write_trace

Capture = pytest.CaptureFixture[str]
AS = ("--as", "prosparse-7b", "--slots", "24", "--set", "prediction=perfect")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a trace, a prior, and files that are not what they seem."""
    path = tmp_path_factory.mktemp("cli")
    write_trace(random_trace(n_decode=12), path / "eval.arrow")
    write_trace(random_trace(seed=1, source="b"), path / "prior.arrow")
    write_trace(random_trace(n_layers=3, source="b"), path / "other.arrow")
    write_trace(random_trace(model="tiny-reglu"), path / "liar.arrow")
    write_trace(of_chunks([], 64, n_layers=2), path / "empty.arrow")
    (path / "foreign.arrow").write_bytes(b"not a trace at all" * 9)
    pd.DataFrame({"a": [1]}).to_parquet(path / "foreign.parquet")
    pd.DataFrame({"a": [1]}).to_feather(path / "table.arrow")
    whole = bytearray((path / "eval.arrow").read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    (path / "damaged.arrow").write_bytes(bytes(whole))
    (path / "typo.toml").write_text('contoller = "anb"\n', encoding="utf-8")
    (path / "sweep.toml").write_text(
        f'trace = "{(path / "eval.arrow").as_posix()}"\n'
        "[base]\nmodel_as = 'prosparse-7b'\nprediction = 'perfect'\n"
        "[grid]\nslots = [8, 24]\nlink = ['pcie3', 'own']\npolicy = ['tam', 'lru']\n"
        "[[cells]]\npolicy = 'lru'\ncontroller = 'anb'\n",
        encoding="utf-8",
    )
    return path


def kairox(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    assert (ended.value.code or 0) == code


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate", "missing.arrow", *AS), "missing.arrow"),
        (("simulate", "foreign.arrow", *AS), "foreign.arrow"),
        (("simulate", "table.arrow", *AS), "table.arrow"),
        (("simulate", "damaged.arrow", *AS), "damaged.arrow"),
        (("info", "foreign.arrow"), "foreign.arrow"),
        (("info", "damaged.arrow"), "damaged.arrow"),
        (("simulate", "eval.arrow"), "whose costs are not known"),
        (("simulate", "liar.arrow"), "with n_layers 2, and that model has 6"),
        (("simulate", "eval.arrow", *AS, "--slots", "1,2,3"), "3 numbers"),
        (("simulate", "eval.arrow", *AS, "--slots", "lots"), "allowed: a number of slots"),
        (("simulate", "eval.arrow", *AS, "--slots", "64"), "does not fit on pc1: attention"),
        (("simulate", "eval.arrow", *AS, "--set", "btea=0.8"), "did you mean 'beta'?"),
        (("simulate", "eval.arrow", *AS, "--set", "beta"), "--set takes key=value"),
        (("simulate", "eval.arrow", *AS, "--set", "beta=" + "1" * 5000), "beta must be a number"),
        (("simulate", "eval.arrow", *AS, "--set", "beta=" + "[" * 9999), "beta must be a number"),
        (("simulate", "eval.arrow", *AS, "--set", "beta=2"), "beta must be in [0, 1)"),
        (("simulate", "eval.arrow", *AS, "--policy", "lur"), "did you mean 'lru'?"),
        (("simulate", "eval.arrow", *AS, "--policy", "S3-FIFO"), "did you mean 's3fifo'?"),
        (("simulate", "eval.arrow", *AS, "--policy", "oracle"), "did you mean 'belady'?"),
        (("simulate", "eval.arrow", *AS, "--settings", "typo.toml"), "did you mean 'controller'?"),
        (("simulate", "eval.arrow", *AS, "--hardware", "pc9"), "no hardware profile 'pc9'"),
        (
            ("simulate", "eval.arrow", *AS, "--hardware", "rtx4080"),
            "it is a gpu, and a machine is gpu+cpu+link, such as 'rtx4080+epyc-7542+pcie4'",
        ),
        (("simulate", "eval.arrow", *AS, "--link", "pcie9"), "no link profile 'pcie9'"),
        (("simulate", "eval.arrow", *AS, "--as", "gpt"), "unknown model 'gpt'"),
        (
            ("simulate", "eval.arrow", *AS, "--policy", "lru", "--controller", "anb"),
            "nothing in common",
        ),
        (("simulate", "eval.arrow", *AS, "--policy", "static"), "needs a prior"),
        (
            ("simulate", "eval.arrow", *AS, "--policy", "static", "--prior", "eval.arrow"),
            "overlaps the tokens",
        ),
        (
            ("simulate", "eval.arrow", *AS, "--policy", "static", "--prior", "other.arrow"),
            "both must be of the same model",
        ),
        (
            ("simulate", "eval.arrow", *AS, "--policy", "static", "--prior", "none.arrow"),
            "none.arrow",
        ),
        (("sweep", "missing.toml", "-o", "r.parquet"), "cannot read the sweep file"),
        (("sweep", "typo.toml", "-o", "r.parquet"), "unknown key 'contoller'"),
        (("sweep", "sweep.toml", "-o", "r.parquet", "--trace", "none.arrow"), "none.arrow"),
        (("plot", "foreign.parquet", "-o", "figures"), "no figure can be drawn"),
        (
            ("best", "foreign.parquet", "--hardware", "pc1", "-o", "b.toml"),
            "not a sweep's table",
        ),
        (("best", "none.parquet", "--hardware", "pc1", "-o", "b.toml"), "none.parquet"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    folder: Path,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(folder)
    kairox(*arguments, code=2)
    captured = capsys.readouterr()
    assert captured.err.startswith("kairox: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_wrong_options_exit_with_2_too(capsys: Capture) -> None:
    kairox("simulate", "--polcy", "tam", code=2)
    assert "--policy" in capsys.readouterr().err


def test_a_missing_extra_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with (
        pytest.raises(KairoxError, match=r"needs torch, of the extra `exec`.*pip install -e"),
        exec_extra(),
    ):
        importlib.import_module("torch")
    with pytest.raises(ModuleNotFoundError), exec_extra():  # a bug of ours is no missing extra
        importlib.import_module("kairox_sim.nowhere")


# -- what is printed ----------------------------------------------------------------------------


def simulated(capsys: Capture, *arguments: object) -> dict[str, Any]:
    kairox("simulate", *arguments, "--json")
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", ["tam", "lru", "static", "none"])
def test_json_of_simulate_adds_up(folder: Path, policy: str, capsys: Capture) -> None:
    prior = ("--prior", folder / "prior.arrow")
    content = simulated(capsys, folder / "eval.arrow", *AS, *prior, "--policy", policy)
    assert list(content) == [
        "labels", "summary", "totals", "warnings", "settings", "provenance",
    ]  # fmt: skip
    assert list(content["summary"]) == [*METRICS, *AGAINST]
    totals = content["totals"]
    assert totals["evaluated"] == totals["hit_on_time"] + totals["residual"] > 0
    assert totals["loads"] == (
        totals["used"] + totals["wasted"] + totals["cancelled"] + totals["unused_yet"]
    )
    assert (totals["loads"] > 0) == (policy in ("tam", "lru"))
    assert content["summary"]["hit_on_time"] + content["summary"]["residual_share"] == 1
    if policy == "none":
        assert content["summary"]["wasted_share"] is None  # 0/0 is unknown, not 0
    assert Settings.of(content["settings"]).policy == policy


def test_late_loads_are_counted(folder: Path, capsys: Capture) -> None:
    late = simulated(capsys, folder / "eval.arrow", *AS, "--policy", "lru", "--link", "pcie3",
                     "--set", "trigger=attn_out", "--slots", "16")  # fmt: skip
    assert late["totals"]["late"] > 0
    assert late["summary"]["late_share"] > 0


def test_options_and_settings_files_mean_the_same(folder: Path, capsys: Capture) -> None:
    file = folder / "anb.toml"
    Settings(controller="anb", policy_params={"beta": 0.8}, slots=24).dump(file)
    options = ("--controller", "anb", "--set", "beta=0.8")
    one = simulated(capsys, folder / "eval.arrow", *AS, *options)
    two = simulated(capsys, folder / "eval.arrow", *AS, "--settings", file)
    assert one == two
    assert one["settings"]["policy_params"] == {"beta": 0.8}
    over = simulated(capsys, folder / "eval.arrow", *AS, "--settings", file, "--policy", "tam",
                     "--slots", "8")  # fmt: skip
    assert (over["settings"]["slots"], over["settings"]["controller"]) == (8, "anb")


def test_an_empty_trace_is_an_empty_report_and_exit_code_0(folder: Path, capsys: Capture) -> None:
    content = simulated(capsys, folder / "empty.arrow", *AS)
    assert content["summary"]["tok_s"] is None
    assert content["summary"]["n_decode"] == 0
    assert "no decode steps" in content["warnings"][0]
    kairox("info", folder / "empty.arrow", "--json")
    assert json.loads(capsys.readouterr().out)["stats"]["n_tokens"] == 0


def test_tables_for_people(folder: Path, capsys: Capture) -> None:
    kairox("simulate", folder / "eval.arrow", *AS, "--policy", "lru", "--slots", "2")
    captured = capsys.readouterr()
    rows = [line.split("│") for line in captured.out.splitlines() if line.startswith("│")]
    assert rows[0][1].strip() == "tok_s_scaled"  # a stand-in: what its own layers take is no speed
    (tok_s,) = [row for row in rows if row[1].strip() == "tok_s"]
    assert [part.strip() for part in tok_s[3:5]] == list(METRICS["tok_s"][::-1])
    assert "warning: no policy headroom" in captured.err
    assert "2 of 64 neurons of a layer resident" in captured.out
    assert "times and amounts are of the trace's layers" in captured.out
    kairox("info", folder / "eval.arrow")
    assert "density" in capsys.readouterr().out


def test_tables_of_a_trace_say_what_it_leaves_out(folder: Path, capsys: Capture) -> None:
    run = {"kind": "plain", "weights": "int8", "dtype": "bfloat16", "numerics": "fast"}
    trace = random_trace(approximate="by thresholds", run=run)
    write_trace(trace, folder / "thresholds.arrow")
    kairox("info", folder / "thresholds.arrow")
    told = capsys.readouterr().out
    assert "exact; approximate: neurons below an activation threshold are left out" in told
    assert "plain, FFN rows int8, all else bfloat16, numerics fast" in told


def test_info_warns_of_a_loop(folder: Path, capsys: Capture) -> None:
    kairox("info", folder / "eval.arrow", "--json")
    content = json.loads(capsys.readouterr().out)
    assert content["header"]["model"] == "toy"
    assert content["stats"]["n_layers"] == 2
    assert content["warnings"] == []
    loop = of_chunks([[[[1]]] for _ in range(30)], 64, tokens=[3, 4] * 15)
    write_trace(loop, folder / "loop.arrow")
    kairox("info", folder / "loop.arrow")
    assert "the trace is a loop: 100% of its tokens" in capsys.readouterr().err


def test_steps_and_slices_go_to_disk(folder: Path, capsys: Capture) -> None:
    steps, slices = folder / "steps.parquet", folder / "slices.parquet"
    simulated(capsys, folder / "eval.arrow", *AS, "--steps", steps, "--slices", slices)
    assert list(pd.read_parquet(steps).columns) == list(STEP_COLUMNS)
    assert set(pd.read_parquet(slices)["lane"]) >= {"gpu", "cpu", "h2d"}


def test_sweep_then_best(folder: Path, capsys: Capture) -> None:
    table, chosen = folder / "r.parquet", folder / "best.toml"
    kairox("sweep", folder / "sweep.toml", "-o", table, "--workers", 1)
    captured = capsys.readouterr()
    said = captured.err
    assert "9 cells, 8 ok, 1 refused, 0 failed" in said
    assert "nothing in common" in said
    rows = [line.split("│")[1:-1] for line in captured.out.splitlines() if line.startswith("│")]
    assert len(rows) == 8
    assert {row[1].strip() for row in rows} == {"pc1", "pc1+pcie3"}
    speeds = [float(row[2]) for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    kairox("best", table, "--hardware", "pc1", "-o", chosen, code=2)
    assert "choose one with --link: own, pcie3" in capsys.readouterr().err
    kairox("best", table, "--hardware", "pc1", "--link", "pcie3", "-o", chosen, "--json")
    row = json.loads(capsys.readouterr().out)["row"]
    assert row["label"] not in row["tied"]
    assert row["tok_s"] == pytest.approx(
        simulated(capsys, folder / "eval.arrow", "--settings", chosen, "--link", "pcie3")[
            "summary"
        ]["tok_s"]
    )
    capsys.readouterr()
    kairox("best", table, "--hardware", "pc1", "--link", "own", "--slots-max", 8, "-o", chosen)
    out = capsys.readouterr().out
    rows = pd.read_parquet(table).query("status == 'ok' and link.isna() and slots == 8")
    fastest = rows.loc[rows["tok_s_scaled"].idxmax()]
    assert f" on pc1: {fastest['tok_s_scaled']:.4g} tokens/s scaled to the model's layers" in out
    assert "a stand-in: another model's activations" in out
    assert "lossy" not in out
    lossy = pd.read_parquet(table).assign(exactness=LOSSY)
    lossy.to_parquet(folder / "lossy.parquet")
    kairox("best", folder / "lossy.parquet", "--hardware", "pc1", "--link", "own", "-o", chosen)
    assert LOSSY in capsys.readouterr().out
    kairox("best", table, "--hardware", "pc1", "--link", "own", "--slots-max", 8, "-o", chosen)
    assert tomllib.loads(chosen.read_text(encoding="utf-8"))["slots"] == 8
    # 24 of 64 neurons take 10.9 GB with the margin: within 11 GB, and not within 10.5 GB
    for vram, slots in (("11GB", 24), ("10GB", 8), ("10GiB", 8)):
        kairox("best", table, "--hardware", "pc1", "--link", "own", "--vram", vram, "-o", chosen)
        assert tomllib.loads(chosen.read_text(encoding="utf-8"))["slots"] == slots, vram
    capsys.readouterr()
    kairox("best", table, "--hardware", "pc1", "--link", "own", "--vram", "12", "-o", chosen,
           code=2)  # fmt: skip
    assert "12GB (1e9) or 12GiB (2**30)" in capsys.readouterr().err


def test_what_a_sweep_shows_is_short_and_warnings_once(capsys: Capture) -> None:
    row = {"status": "ok", "label": "lru 8", "fits": True, "costs": "own costs",
           "exactness": "exact",
           "machine": "calibrated-emulated-pc1-slowed-100x-deterministic+pcie3",
           "tok_s_scaled": 2.0, "hit_on_time": 0.5, "residual_share": 0.5,
           "loads_per_layer_step": 1.0, "over_bound": float("nan"),
           "warnings": "a; with more\nb"}  # fmt: skip
    slow = row | {"label": "slowest", "tok_s_scaled": 1.0, "warnings": "b"}
    bound = row | {"fits": False, "exactness": f"{APPROXIMATE}; {LOSSY}"}
    table = pd.DataFrame([slow, bound, *([row] * (MOST_ROWS - 1)), row | {"status": "refused"}])
    print_fastest(table)
    out = capsys.readouterr().out
    assert out.count("lru 8") == MOST_ROWS
    assert "slowest" not in out
    assert "…" not in out  # names of machines differ at their ends
    assert out.count(" no ") == 1
    assert (out.count("(approximate,"), out.count("lossy)")) == (1, 1)
    assert "and 1 slower ones" in out
    assert "unknown" in out
    assert distinct_warnings(table) == ["b (22 of 22 cells)", "a; with more (21 of 22 cells)"]


def test_the_sweep_file_of_the_help_and_of_the_readme(folder: Path, capsys: Capture) -> None:
    kairox("sweep", "--help")
    said = capsys.readouterr().out
    for part in ("[base]", "[grid]", "[[cells]]", "seeds =", '"tam.beta" = [0.8, 0.9]', "system ="):
        assert part in said
    readme = Path(__file__).parent.parent / "experiments" / "README.md"
    (spec,) = re.findall(r"^```toml\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.M | re.S)
    path = folder / "readme.toml"
    path.write_text(spec, encoding="utf-8")
    cells = expand(Sweep.load(path))
    assert len(cells) == 2 * (1 + 2) + 1  # beta is tam's
    path.write_text(f'hardware = "pc1"\n{spec}', encoding="utf-8")
    with pytest.raises(KairoxError, match=r"hardware: of every cell, so put it into \[base\]"):
        Sweep.load(path)


def test_figures_of_a_table(folder: Path, capsys: Capture) -> None:
    table, figures = folder / "p.parquet", folder / "figures"
    kairox("sweep", folder / "sweep.toml", "-o", table, "--workers", 1)
    capsys.readouterr()
    kairox("plot", table, "-o", figures, "--link", "pcie3", "--format", "png", "--json")
    content = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in figures.iterdir()) == [
        "budget_pc1_exact_pcie3.png",
        "throughput_pc1.png",
        "time_split_pc1_exact_pcie3.png",
    ]
    assert len(content["figures"]) == 3
    assert sorted(content["left_out"]) == ["controller", "momentum", "pipeline", "systems",
                                           "validation"]  # fmt: skip
    kairox("plot", table, "-o", figures, "--hardware", "pc2", code=2)
    assert "no hardware 'pc2'; it has pc1" in capsys.readouterr().err
    kairox("plot", table, "-o", figures, "--format", "gif", code=2)
    assert "allowed: png, pdf, svg" in capsys.readouterr().err


# -- what there is -------------------------------------------------------------------------------


def test_hardware_lists_machines_and_parts(capsys: Capture) -> None:
    kairox("hardware")
    out = capsys.readouterr().out
    assert "gpu+cpu+link" in out.lower()
    for name in ("pc1", "rtx4070", "i7-13700k", "rtx4090", "epyc-7542", "pcie5", "no limit"):
        assert name in out
    kairox("hardware", "--json")
    content = json.loads(capsys.readouterr().out)
    (pc1,) = [row for row in content["machines"] if row["name"] == "pc1"]
    assert (pc1["gpu"], pc1["cpu"], pc1["link"]) == ("rtx4070", "i7-13700k", "pcie4")
    profile = load_profile("pc1")
    assert pc1["vram_bytes"] == profile.vram_bytes.value
    assert pc1["ffn_cpu_bytes_per_s"] == profile.ffn_cpu.bytes_per_s.value
    assert [row["name"] for row in content["parts"]["link"]] == ["pcie3", "pcie4", "pcie5"]
    kairox("hardware", "rtx4090+epyc-7542+pcie4")
    assert "vram_margin_bytes" in capsys.readouterr().out


def test_models_lists_the_catalogue(capsys: Capture) -> None:
    kairox("models")
    out = capsys.readouterr().out
    assert all(name in out for name in CATALOGUE)
    assert "prosparse-7b@q8_0" in out
    kairox("models", "--json")
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(CATALOGUE)
    assert rows["prosparse-7b"]["bytes_per_neuron"] == 3 * 4096 * 2
    assert rows["prosparse-7b"]["predictor_rank"] == 1024
    assert rows["llama2-7b"]["sparse"] is False
    assert rows["llama2-7b"]["predictor_rank"] is None
    kairox("models", "prosparse-7b@q8_0", "--json")
    assert json.loads(capsys.readouterr().out)[0]["bytes_per_neuron"] == 3 * 4096 * 34 // 32


# -- the program itself -------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.__name__)
def test_every_command_has_an_example_and_json(command: Any, capsys: Capture) -> None:
    name = command.__name__.replace("_", "-")
    assert f"Example: kairox {name} " in " ".join(command.__doc__.split())
    kairox(name, "--help")
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.__name__)
def test_defaults_that_the_help_names_are_shown(command: Any) -> None:
    """Brackets in a help text are rich's markup, which shows nothing of what it does not know."""
    options = inspect.signature(command, eval_str=True).parameters.values()
    texts = [help_of(option.annotation) for option in options]
    written = [text for text in texts if "default: " in text]
    assert all(text.count("\\[default: ") == 1 for text in written)
    assert not any(re.search(r"(?<!\\)\[[a-z/]", text) for text in texts)
    name = command.__name__.replace("_", "-")
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
    for text in written:
        default = text.partition("[")[2].split()[:2]
        assert " ".join(default) in re.sub(r"[│\s]+", " ", shown)


def help_of(annotation: Any) -> str:
    return next((m.help for m in getattr(annotation, "__metadata__", ()) if m.help), "")


def test_the_same_json_whatever_the_hash_seed(folder: Path) -> None:
    outputs = []
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "kairox_sim.cli", "simulate", str(folder / "eval.arrow"), *AS,
             "--controller", "anb", "--json"],
            env={**os.environ, "PYTHONHASHSEED": seed, "PATH": ""},  # no git: its commit may move
            capture_output=True, check=True,
        )  # fmt: skip
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])["summary"]["tok_s"] > 0


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, kairox_sim, kairox_sim.cli; "
        "heavy = {'torch', 'simpy', 'pandas', 'matplotlib', 'pyarrow', 'joblib'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_exist() -> None:
    import kairox_sim

    assert dir(kairox_sim) == sorted(kairox_sim.__all__)
    for name in kairox_sim.__all__:
        assert getattr(kairox_sim, name) is not None
    assert callable(kairox_sim.simulate)
    assert callable(kairox_sim.sweep)
    with pytest.raises(AttributeError, match="no attribute 'simulator'"):
        kairox_sim.simulator  # noqa: B018


def test_a_warning_is_a_line_without_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def warns(**_: Any) -> None:
        warnings.warn("the disk is nearly full", stacklevel=1)

    monkeypatch.setattr(cli, "app", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        main(["info"])
    assert capsys.readouterr().err == "warning: the disk is nearly full\n"
