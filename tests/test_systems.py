"""Every system: it runs or says why not; what it sets; that it does what it is named for."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from toys import random_trace
from typer.testing import CliRunner

from kairox_sim import KairoxError, Settings, simulate, sweep
from kairox_sim.cli import app
from kairox_sim.costs import costs_for, max_layers
from kairox_sim.dispatch import cheapest_split
from kairox_sim.flows import to_ns
from kairox_sim.hardware import load_profile
from kairox_sim.metrics import RunResult
from kairox_sim.model import find_shape
from kairox_sim.settings import label
from kairox_sim.sweeps import Sweep, expand
from kairox_sim.systems import SYSTEMS, find_system
from kairox_sim.trace import Trace, read_trace, write_trace

TRACES = Path(__file__).parent.parent / "traces"
REFUSED = {"dejavu"}  # on pc1, whose memory holds neither model


@cache
def evaluated(n: int = 80) -> Trace:
    """The first steps of the shipped trace, prefill included."""
    whole = read_trace(TRACES / "tiny-reglu-eval.arrow")
    return whole.select(steps=sorted(set(whole.step.tolist()))[:n])


@cache
def prior() -> Trace:
    return read_trace(TRACES / "tiny-reglu-profile.arrow")


@cache
def _ran(name: str, model: str, hardware: str, given: str) -> RunResult:
    chosen = Settings().with_overrides({"system": name, "model_as": model, **json.loads(given)})
    return simulate(evaluated(), chosen, hardware=hardware, prior=prior())


def ran(
    name: str, model: str = "prosparse-7b", hardware: str = "pc1", **given: object
) -> RunResult:
    """A run, made once."""
    return _ran(name, model, hardware, json.dumps(given, sort_keys=True))


# -- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in REFUSED])
@pytest.mark.parametrize("model", ["prosparse-7b", "prosparse-13b"])
def test_a_system_runs_and_its_counts_add_up(name: str, model: str) -> None:
    result = ran(name, model)
    totals, summary, shape = result.totals, result.summary, find_shape(model)
    assert totals["evaluated"] == totals["hit_on_time"] + totals["fetched"] + totals["residual"]
    assert totals["loads"] == (
        totals["used"] + totals["wasted"] + totals["cancelled"] + totals["unused_yet"]
    )
    dense = name == "llama.cpp"
    assert (totals["evaluated"] == 6 * 896 * len(result.steps)) == dense
    assert result.labels["setting"] == name
    assert result.labels["gating"] == ("dense" if dense else "predicted")
    assert result.labels["costs"] == f"stand-in: tiny-reglu activations, {model} costs"
    assert result.labels["prediction"] == ("no prediction" if dense else "perfect prediction")
    assert result.provenance["fits"]
    # The most that fits: not even one more slot per layer would.
    left = result.provenance["vram_bytes"] - result.provenance["device_bytes"]
    per_slot = shape.n_layers * shape.n_neurons / 896 * shape.bundle_bytes("predicted")
    per_layer = shape.attention_bytes + shape.n_neurons * shape.neuron_bytes
    assert 0 <= left < (1.05 * per_layer if dense else per_slot)
    assert summary["bound_s"] <= summary["tpot_s"]
    assert summary["common_bound_s"] <= summary["tpot_s"]


def test_the_common_bound_is_the_same_for_every_system() -> None:
    names = [name for name in SYSTEMS if name not in REFUSED]
    assert len({ran(name).summary["common_bound_s"] for name in names}) == 1


def test_where_not_everything_fits_deja_vu_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(KairoxError) as refused:
        ran("dejavu", "prosparse-13b")
    assert str(refused.value).startswith(
        "prosparse-13b (predicted, 13824 slots per layer) does not fit on pc1: attention 8.389 + "
    )
    parts, _, rest = str(refused.value).partition(": ")[2].partition(" = ")
    total, _, limit = rest.partition(" GB")
    terms = [float(term.split()[-1]) for term in parts.split(" + ")]
    assert sum(terms) == pytest.approx(float(total), abs=0.005)
    assert float(total) > 28
    assert limit.startswith(" > 12.885 GB (")
    result = ran("dejavu", hardware="h200+i7-13700k+pcie4")
    assert result.summary["hit_resident"] == 1
    assert result.totals["residual"] == result.totals["loads"] == 0


def test_a_machine_that_holds_not_even_the_rest_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(KairoxError, match=r"does not fit on pc1: attention .* with no neuron "):
        ran("powerinfer", "opt-66b")


# -- what they are, as settings -----------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_preset_sets_what_it_lists_and_nothing_else(name: str) -> None:
    settings, defaults = Settings.of({"system": name}), Settings()
    for key in Settings.model_fields:
        wanted = (
            name if key == "system" else SYSTEMS[name].settings.get(key, getattr(defaults, key))
        )
        assert getattr(settings, key) == wanted, key
    assert label(settings) == name
    assert SYSTEMS[name].line[0].islower() or SYSTEMS[name].line.startswith(("Neu", "LLM", "De"))
    assert SYSTEMS[name].source


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_settings_file_keeps_its_system(name: str, tmp_path: Path) -> None:
    settings = Settings.of({"system": name, "slots": 77, "seed": 5})
    assert Settings.load(settings.dump(tmp_path / "s.toml")) == settings
    (tmp_path / "short.toml").write_text(f'system = "{name}"\nslots = 77\nseed = 5\n')
    assert Settings.load(tmp_path / "short.toml") == settings


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("powerinfer", {"dispatch": "serial"}, "powerinfer serial"),
        ("kairox-paper", {"late": "cpu"}, "kairox-paper cpu"),
        ("kairox-paper", {"groups": "random:32"}, "kairox-paper random:32"),
        ("kairox-paper", {"handovers": 1}, "kairox-paper handovers=1"),
        ("kairox-paper", {"epsilon": 0.1}, "kairox-paper(epsilon=0.1)"),
        ("kairox-paper", {"alpha": 0.2}, "kairox-paper(alpha=0.2)"),
        ("kairox-paper", {"slots": 100}, "kairox-paper 100"),
        ("kairox-guide", {"beta": 0.5, "slots": 100}, "kairox-guide(beta=0.5) 100"),
        ("lru", {"policy": "sieve"}, "lru sieve"),
        ("qinfer", {"copies": "bundle"}, "qinfer bundle"),
        ("llama.cpp", {"slots": "ngl:2"}, "llama.cpp ngl:2"),
        ("fiddler", {"gating": "exact"}, "fiddler exact"),
        ("powerinfer", {"placement": "counts"}, "powerinfer counts"),
    ],
)  # fmt: skip
def test_what_is_overridden_is_in_force_and_in_the_label(
    name: str, given: dict[str, object], said: str
) -> None:
    settings = Settings().with_overrides({"system": name, **given})
    assert label(settings) == said
    for key, value in given.items():
        params = settings.policy_params | settings.controller_params
        assert getattr(settings, key, params.get(key)) == value
    assert settings == Settings().with_overrides({"system": name}).with_overrides(given)


def test_another_system_starts_from_its_own_values_and_keeps_the_runs() -> None:
    before = Settings().with_overrides(
        {"system": "kairox-paper", "epsilon": 0.1, "late": "cpu", "slots": 9, "seed": 4,
         "model_as": "prosparse-7b", "prior": "p.arrow", "context_start": 100}
    )  # fmt: skip
    after = before.with_overrides({"system": "kairox-released"})
    assert label(after) == "kairox-released context_start=100"
    assert (after.policy_params, after.late, after.slots) == ({}, "stall", "vram")
    kept = (after.seed, after.model_as, after.prior, after.context_start)
    assert kept == (4, "prosparse-7b", "p.arrow", 100)
    assert before.with_overrides({"policy": "lru"}).policy_params == {}


def test_a_name_that_is_none_gets_the_nearest() -> None:
    with pytest.raises(KairoxError, match="unknown system 'kairox-papr'; did you mean 'kairox-pap"):
        Settings.of({"system": "kairox-papr"})
    with pytest.raises(KairoxError, match=r"allowed: llama\.cpp, powerinfer, powerinfer-serial"):
        find_system("xyzzy")


def test_what_a_system_sets_cannot_be_unset_in_silence() -> None:
    with pytest.raises(KairoxError, match="late: system 'kairox-paper' sets it; give a value, or"):
        Settings.of({"system": "kairox-paper", "late": None})
    assert Settings.of({"system": "powerinfer", "late": None}).late is None  # it does not set it
    assert Settings.of({"system": None, "late": None}) == Settings()


def test_batches_are_refused_by_name() -> None:
    with pytest.raises(KairoxError, match="batch 2 is not built: decoding is of one sequence"):
        Settings.of({"system": "powerinfer", "batch": 2})
    with pytest.raises(KairoxError, match="batch 2 is not built"):
        Settings().with_overrides({"batch": 2})


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("kairox-guide", {"policy": "tam", "controller": "anb", "groups": None, "handovers": 1}),
        ("kairox-paper", {"policy": "tam_paper", "controller": "anb_paper", "late": "stall"}),
        ("kairox-released", {"policy": "tam_released", "controller": "swap_cap"}),
    ],
)
def test_kairox_is_what_its_sources_say(name: str, wanted: dict[str, object]) -> None:
    settings = Settings.of({"system": name})
    assert {key: getattr(settings, key) for key in wanted} == wanted
    if name != "kairox-guide":  # groups of 16; a copy a matrix, synchronised every 4; two merges
        engine = (settings.groups, settings.copies, settings.copies_per_sync, settings.handovers)
        assert engine == ("metis:16", "matrix", 4, 2)
        assert (settings.trigger, settings.start) == ("attn_out", "first")


# -- as a command and as an axis ----------------------------------------------------------------


def test_systems_are_listed_with_a_line_and_a_source() -> None:
    done = CliRunner().invoke(app, ["systems", "--json"])
    listed = json.loads(done.stdout)
    assert [entry["name"] for entry in listed] == list(SYSTEMS)
    assert all(entry["line"] and entry["source"] and entry["settings"] for entry in listed)
    one = json.loads(CliRunner().invoke(app, ["systems", "qinfer", "--json"]).stdout)
    assert one == [entry for entry in listed if entry["name"] == "qinfer"]
    shown = CliRunner().invoke(app, ["systems", "qinfer"]).stdout
    assert "lookahead_from" in shown
    assert "Decided here: Up, gate and down move together" in shown
    table = CliRunner().invoke(app, ["systems"]).stdout
    assert all(name in table for name in SYSTEMS)
    wrong = CliRunner().invoke(app, ["systems", "qinfr"])
    assert wrong.exit_code != 0
    assert "did you mean 'qinfer'" in str(wrong.exception)


def test_a_system_on_the_command_line(tmp_path: Path) -> None:
    trace = write_trace(random_trace(), tmp_path / "t.arrow")
    learnt = write_trace(random_trace(seed=1, source="b"), tmp_path / "p.arrow")
    given = ["simulate", str(trace), "--system", "powerinfer", "--prior", str(learnt), "--as",
             "prosparse-7b", "--json", "--no-oracle"]  # fmt: skip
    plain = json.loads(CliRunner().invoke(app, given).stdout)
    assert plain["labels"]["setting"] == "powerinfer"
    assert plain["settings"]["placement"] == "solver"
    changed = CliRunner().invoke(app, [*given, "--set", "dispatch=serial", "--slots", "9"])
    assert json.loads(changed.stdout)["labels"]["setting"] == "powerinfer serial 9"
    changed = CliRunner().invoke(app, [*given, "--policy", "lru"])
    assert json.loads(changed.stdout)["labels"]["setting"] == "powerinfer lru"


def test_systems_are_an_axis_of_a_sweep(tmp_path: Path) -> None:
    spec = Sweep.model_validate(
        {
            "trace": str(write_trace(random_trace(n_decode=6), tmp_path / "t.arrow")),
            "prior": str(write_trace(random_trace(seed=1, source="b"), tmp_path / "p.arrow")),
            "base": {"model_as": "prosparse-7b"},
            "grid": {"system": ["kairox-guide", "kairox-released", "llama.cpp", "powerinfer"],
                     "tam.beta": [0.5, 0.9], "slots": [16, "ngl:1"]},
        }
    )  # fmt: skip
    cells = [cell.settings for cell in expand(spec)]
    # beta only where the policy is tam; every cell has its own system's parameters.
    assert [label(s) for s in cells if s.slots == 16] == [
        "kairox-guide(beta=0.5) 16", "kairox-guide(beta=0.9) 16", "kairox-released 16",
        "llama.cpp 16", "powerinfer 16",
    ]  # fmt: skip
    grid = {"system": ["kairox-guide", "llama.cpp", "powerinfer"]}
    rows = sweep(spec.model_copy(update={"grid": grid}))
    assert rows["status"].tolist() == ["ok"] * 3, rows["why"].tolist()
    assert rows["system"].tolist() == rows["label"].tolist() == grid["system"]
    assert rows["dispatch"].tolist() == ["concurrent", "layers", "concurrent"]


# -- that they do what they are named for -------------------------------------------------------


def test_llama_cpp_moves_and_predicts_nothing_and_takes_what_its_bytes_take() -> None:
    """Layer by layer, each at the rate of the side it is on; only fixed costs come on top."""
    result = ran("llama.cpp", "prosparse-13b")
    steps = result.steps[result.steps["phase"] == "decode"]
    assert (steps[["loads", "predict_s", "decide_s", "swap_busy_s", "fetched"]] == 0).all(axis=None)
    profile, shape = load_profile("pc1"), find_shape("prosparse-13b")
    n_whole = max_layers(profile, shape, int(result.steps["context_len"].max()))
    assert 13 < n_whole < 20  # 2 of the trace's 6 layers, and part of one
    part = n_whole * 6 * 896 // 40 - 2 * 896
    assert result.provenance["slots"] == [0, 0, 0, part, 896, 896]
    n_gpu = 2 + part / 896
    dram = profile.dram_bytes_per_s.value
    ffn = shape.n_neurons * shape.neuron_bytes
    first = steps.iloc[0]
    kv = shape.kv_bytes_per_token * first["context_len"]
    on_gpu = (shape.attention_bytes + kv) / profile.attention.bytes_per_s.value + (
        ffn / profile.ffn_gpu.bytes_per_s.value
    )
    on_cpu = (shape.attention_bytes + kv + ffn) / dram
    head = 6 / shape.n_layers * (shape.head_bytes + shape.row_bytes) / dram
    by_hand = n_gpu * on_gpu + (6 - n_gpu) * on_cpu + head
    assert by_hand < first["wall_s"] < by_hand + 1e-3
    assert first["wall_s"] == pytest.approx(by_hand, rel=0.03)
    # Whoever waits does not work: the two sides never overlap.
    assert (steps["gpu_busy_s"] + steps["cpu_busy_s"] <= steps["wall_s"] + 1e-12).all()


@pytest.mark.parametrize("hardware", ["pc1", "pc2"])
@pytest.mark.parametrize("model", ["prosparse-7b", "prosparse-13b"])
@pytest.mark.parametrize("slots", ["ngl", "ngl:3", "ngl:0", "all layers"])
def test_llama_cpp_of_a_few_layers_is_as_fast_as_of_all(
    model: str, hardware: str, slots: str
) -> None:
    n_layers, profile = find_shape(model).n_layers, load_profile(hardware)
    if slots == "all layers":
        slots = f"ngl:{n_layers}"
        profile = profile.model_copy(
            update={"vram_bytes": profile.vram_bytes.model_copy(update={"value": 1e12})}
        )
    tok_s, on_device = {}, {}
    for n in (6, n_layers):
        trace = random_trace(n_layers=n, n_neurons=896, n_decode=3)
        chosen = Settings.of({"system": "llama.cpp", "model_as": model, "slots": slots})
        run = simulate(trace, chosen, hardware=profile)
        tok_s[n], on_device[n] = run.summary["tok_s_scaled"], run.provenance["device_bytes"]
    assert tok_s[6] == pytest.approx(tok_s[n_layers], rel=1e-3)
    assert on_device[6] == on_device[n_layers]


@pytest.mark.parametrize("model", ["prosparse-7b", "prosparse-13b"])
def test_powerinfer_is_never_slower_for_computing_on_both_sides(model: str) -> None:
    both, serial = ran("powerinfer", model), ran("powerinfer-serial", model)
    assert both.totals["hit_on_time"] == serial.totals["hit_on_time"]
    assert (both.steps["wall_s"] <= serial.steps["wall_s"]).all()
    assert both.summary["tpot_s"] < serial.summary["tpot_s"]
    assert both.totals["loads"] == serial.totals["loads"] == 0


def test_powerinfer_as_shipped_has_another_layers_hot_set() -> None:
    """Where layers differ, and there are more than 10 of them, as its files are read in the order
    of their names."""
    trace = random_trace(n_layers=12, n_decode=20)
    learnt = random_trace(n_layers=12, n_decode=60, seed=1, source="b")
    base = {"model_as": "prosparse-7b", "slots": 16}
    right, shipped = (
        simulate(trace, Settings().with_overrides({"system": name, **base}), prior=learnt)
        for name in ("powerinfer", "powerinfer-shipped")
    )
    assert shipped.totals["hit_on_time"] < 0.8 * right.totals["hit_on_time"]
    assert shipped.summary["tpot_s"] > right.summary["tpot_s"]


def test_neuralink_eager_is_top_k_without_a_memory() -> None:
    eager = ran("neuralink-eager", "prosparse-13b")
    forgetful = ran("kairox-released", "prosparse-13b", policy="tam_released", controller="fixed",
                    decay=0.0)  # fmt: skip
    assert eager.steps.drop(columns="decide_s").equals(forgetful.steps.drop(columns="decide_s"))
    assert eager.summary["loads_per_layer_step"] > 10
    remembers = ran("kairox-released", "prosparse-13b")
    assert remembers.totals["loads"] < eager.totals["loads"]


def test_linked_reads_are_fewer_than_those_of_neurons_one_by_one() -> None:
    """LRU asks for the same neurons wherever they lie: only reads differ, and gaps are charged."""
    linked, plain = (
        ran("neuralink-linked", "prosparse-13b", policy="lru", observes="evaluated", layout=layout)
        for layout in ("linked", "natural")
    )
    for count in ("loads", "fetched", "hit_on_time", "evictions"):
        assert linked.totals[count] == plain.totals[count]
    assert linked.totals["residual"] == plain.totals["residual"] == 0
    assert linked.totals["fetched"] > 0
    assert linked.summary["tpot_s"] < plain.summary["tpot_s"]
    assert linked.totals["h2d_bytes"] > plain.totals["h2d_bytes"]


def test_qinfer_gives_up_copies_that_have_not_begun() -> None:
    result = ran("qinfer", "prosparse-13b")
    assert result.totals["cancelled"] > 100
    assert result.totals["used"] > 0
    patient = ran("qinfer", "prosparse-13b", late="cpu")
    assert patient.steps["cancelled"].sum() == 0
    assert result.totals["h2d_bytes"] < patient.totals["h2d_bytes"]


def test_llm_in_a_flash_leaves_nothing_to_the_cpu() -> None:
    for model in ("prosparse-7b", "prosparse-13b"):
        result = ran("llm-in-a-flash", model)
        assert result.totals["residual"] == 0
        assert result.steps["cpu_busy_s"].sum() == 0
        assert result.summary["hit_on_time"] + result.summary["fetched_share"] == 1
        assert result.summary["wait_io_s"] > 0
    assert ran("llm-in-a-flash", "prosparse-13b").totals["fetched"] > 0


@pytest.mark.parametrize("machine", ["pc1", "pc2", "pc1-rowcopies"])
def test_fiddlers_choice_is_never_slower_than_all_of_one_kind(machine: str) -> None:
    """By its own model, on an idle machine: nothing copied, everything copied, and all between."""
    costs = costs_for(
        load_profile(machine), find_shape("prosparse-13b"), "predicted", trace_layers=6,
        trace_neurons=896,
    )  # fmt: skip
    chosen = []
    for n, n_tokens, part in ((1, 1, 16), (40, 1, 16), (40, 64, 5), (300, 1, 1), (300, 8, 16)):
        missing = np.arange(n, dtype=np.int32)
        takes = []
        for k in range(n + 1):
            parts = [missing[at : min(k, at + part)] for at in range(0, k, part)]
            copies_s = sum(costs.swap_of_s(0, ids) for ids in parts)
            device_s = copies_s + costs.ffn_gpu_s(k, n_tokens) if k else 0.0
            takes.append(max(to_ns(costs.host_path_s(n - k, n_tokens)), to_ns(device_s)))
        k = cheapest_split(costs, 0, missing, n_tokens, part)
        assert takes[k] == min(takes) <= min(takes[0], takes[-1])
        assert k == takes.index(min(takes))  # of equals the fewest copies
        chosen.append(k / n)
    assert any(0 < share < 1 for share in chosen)


def test_fiddler_copies_some_keeps_none_and_gains() -> None:
    chosen = ran("fiddler", "prosparse-13b")
    on_cpu = ran("fiddler", "prosparse-13b", dispatch="concurrent")
    copied = ran("fiddler", "prosparse-13b", dispatch="gpu")
    assert 0 < chosen.summary["fetched_share"] < 1
    assert chosen.totals["loads"] == 0
    assert chosen.totals["hit_resident"] == on_cpu.totals["hit_resident"]
    assert chosen.summary["tpot_s"] < min(on_cpu.summary["tpot_s"], copied.summary["tpot_s"])


def test_a_longer_context_leaves_fewer_slots() -> None:
    slots = [ran("lru", context_start=n).provenance["slots"][0] for n in (256, 1024, 4096)]
    assert slots == sorted(slots, reverse=True)
    assert slots[0] > slots[2]


# -- models that are not ReLU-sparse ------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama-3-70b", "mixtral-8x7b"])
def test_a_model_that_is_not_relu_sparse_says_so_and_runs_dense(model: str) -> None:
    for name in SYSTEMS:
        if name == "llama.cpp":
            continue
        with pytest.raises(KairoxError, match=f"'{model}' is not ReLU-sparse: with 'silu'"):
            ran(name, model)
    result = ran("llama.cpp", model)
    assert result.summary["tok_s_scaled"] > 0
    assert result.labels["costs"] == f"stand-in: tiny-reglu activations, {model} costs"
