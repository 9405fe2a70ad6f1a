"""Profiles: every bundled one and its parts, what is refused and how, the ways to change one."""

import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from kairox_sim.errors import KairoxError
from kairox_sim.hardware import (
    Quantity,
    bundled_cpus,
    bundled_gpus,
    bundled_links,
    bundled_profiles,
    dump_profile,
    load_cpu,
    load_gpu,
    load_link,
    load_profile,
    scaled,
    with_link,
)

FOLDER = Path(str(resources.files("kairox_sim"))) / "profiles"
RATES = ("bytes_per_s", "flops_per_s", "neurons_per_s")


def quantities(model: Any, key: str = "") -> Iterator[tuple[str, Quantity]]:
    """Every number of a profile with its dotted key."""
    if isinstance(model, Quantity):
        yield key, model
    elif isinstance(model, BaseModel):
        for name in type(model).model_fields:
            yield from quantities(getattr(model, name), f"{key}.{name}".strip("."))
    elif isinstance(model, dict):
        for name, part in model.items():
            yield from quantities(part, f"{key}.{name}")


def test_names_are_the_files() -> None:
    for folder, names in (
        (FOLDER, bundled_profiles()), (FOLDER / "links", bundled_links()),
        (FOLDER / "gpus", bundled_gpus()), (FOLDER / "cpus", bundled_cpus()),
    ):  # fmt: skip
        assert names == sorted(path.stem for path in folder.glob("*.toml"))
    machines = {"pc1", "pc1-rowcopies", "pc2", "emu-pc1", "pc-low", "pc-high"}
    assert machines | {"fork-3070", "fork-3080"} <= set(bundled_profiles())
    assert {"pcie3", "pcie4", "pcie5"} <= set(bundled_links())
    assert {"rtx3060", "rtx3070", "rtx3080", "rtx3080ti", "rtx4070", "rtx4080", "rtx4090",
            "h200"} <= set(bundled_gpus())  # fmt: skip
    assert {"i7-13700k", "ryzen-5700x", "xeon-e5-2680v4", "epyc-7542", "i9-13900k", "i7-12700k",
            "fork-host"} <= set(bundled_cpus())  # fmt: skip


LOADERS: dict[str, Callable[[str | Path], Any]] = {
    "profiles": load_profile, "links": load_link, "gpus": load_gpu, "cpus": load_cpu,
}  # fmt: skip
FILES = [path for path in sorted(FOLDER.rglob("*.toml")) if path.parent.name != "base"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_bundled_file(path: Path, tmp_path: Path) -> None:
    load = LOADERS[path.parent.name]
    profile = load(path)
    assert profile.name == path.stem
    assert load(path.stem) == profile
    numbers = dict(quantities(profile))
    if path.parent.name == "profiles":
        optional = {"h2d.sync_fixed_s", "d2h.sync_fixed_s", "dram_peak_bytes_per_s"}
        optional |= {"deterministic.cpu_ratio", "deterministic.gpu_ratio"}
        assert len(numbers.keys() - optional) == 23 + 3 * len(profile.decide)
    else:
        assert len(numbers) == {"gpus": 3, "cpus": 4, "links": 5}[path.parent.name]
    for key, quantity in numbers.items():
        assert len(quantity.source) > 10, key
        # nobody moves 1 TB/s or more over a bus, or launches in a second
        if key.split(".")[0] in ("h2d", "d2h") and key.endswith("bytes_per_s"):
            assert 1e9 < quantity.value < 1e12
        if key.endswith("_s") and not key.endswith(RATES):
            assert 0 <= quantity.value < 1e-2, key
    if load in (load_profile, load_link):
        assert load(dump_profile(profile, tmp_path / "again.toml")) == profile


@pytest.mark.parametrize("name", ["pc1", "pc2", "emu-pc1", "pc-low", "pc-high"])
def test_speeds_are_in_the_order_of_a_pc(name: str) -> None:
    """GPU memory is faster than host memory, which is faster than the bus."""
    profile = load_profile(name)
    assert profile.ffn_gpu.bytes_per_s.value > 4 * profile.h2d.bytes_per_s.value
    assert profile.dram_bytes_per_s.value > profile.h2d.bytes_per_s.value
    dram = load_profile("pc1") if name == "emu-pc1" else profile  # never binding there
    assert 0.2 <= profile.ffn_cpu.bytes_per_s.value / dram.dram_bytes_per_s.value <= 0.8


def test_row_copies_differ_from_gathers_only_in_that() -> None:
    gather, rows = load_profile("pc1"), load_profile("pc1-rowcopies")
    assert (gather.copies_per_bundle.value, rows.copies_per_bundle.value) == (0, 1)
    update = {"name": gather.name, "copies_per_bundle": gather.copies_per_bundle}
    assert rows.model_copy(update=update) == gather


def test_calibrated_round_trip(tmp_path: Path) -> None:
    """Awkward floats, more policy classes, and the optional fields come back as they were."""
    number = Quantity(value=0.1 + 0.2, source='measured on "x", 3 runs')
    pc1 = load_profile("pc1")
    decide = {**pc1.decide, "tam": pc1.decide["default"].model_copy(update={"fixed_s": number})}
    update = {"kind": "calibrated", "calibrated_as": "prosparse-7b", "decide": decide}
    profile = scaled(pc1, 3.7).model_copy(update=update)
    again = load_profile(dump_profile(profile, tmp_path / "a.toml"))
    assert again == profile
    assert again.decide["tam"].fixed_s == number
    assert again.time_scale == 3.7


def written(tmp_path: Path, data: dict[str, Any]) -> Path:
    path = tmp_path / "changed.toml"
    path.write_text(tomli_w.dumps(data), encoding="utf-8")
    return path


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    whole = dump_profile(load_profile("pc1"), tmp_path / "whole.toml")
    data = tomllib.loads(whole.read_text(encoding="utf-8"))
    change(data)
    return written(tmp_path, data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(dram_byte_per_s=1), ["'dram_byte_per_s'", "'dram_bytes_per_s'"]),
        (lambda d: d["gate"].update(fixd_s=1), ["'gate.fixd_s'", "mean 'fixed_s'"]),
        (lambda d: d["h2d"].update(fixed_s=1), ["'h2d.fixed_s'", "copy_fixed_s, bytes_per_s"]),
        (
            lambda d: d["h2d"]["sync_fixed_s"].update(value=-1.0),
            ["'h2d.sync_fixed_s'", "0 or more"],
        ),
        (lambda d: d["gate"]["fixed_s"].update(src=""), ["'gate.fixed_s.src'", "mean 'source'"]),
        (
            lambda d: d["decide"]["default"].update(per_swaps_s=1),
            ["'decide.default.per_swaps_s'", "mean 'per_swap_s'"],
        ),
        (lambda d: d.pop("vram_bytes"), ["missing key 'vram_bytes'"]),
        (lambda d: d["gate"]["fixed_s"].pop("source"), ["missing key 'gate.fixed_s.source'"]),
        (lambda d: d["gate"].update(fixed_s=1e-5), ["'gate.fixed_s'", "1e-05"]),
        (lambda d: d["gate"]["fixed_s"].update(source=""), ["'gate.fixed_s.source'"]),
        (lambda d: d["gate"]["bytes_per_s"].update(value=0), ["'gate.bytes_per_s'", "above 0"]),
        (lambda d: d["gate"]["bytes_per_s"].update(value="1 GB"), ["gate.bytes_per_s.value"]),
        (lambda d: d["gate"]["bytes_per_s"].update(value=float("inf")), ["finite"]),
        (lambda d: d["gate"]["fixed_s"].update(value=float("nan")), ["finite"]),
        (lambda d: d["gate"]["fixed_s"].update(value=-1e-6), ["0 or more", "-1e-06"]),
        (lambda d: d["copies_per_bundle"].update(value=2), ["0 (a gather) or 1 (row copies)"]),
        (lambda d: d["decide"].pop("default"), ["'decide'", "'default'"]),
        (lambda d: d.update(kind="guess"), ["'kind'", "datasheet", "guess"]),
        (lambda d: d.update(time_scale=0), ["'time_scale'", "greater than 0"]),
        (lambda d: d.update(decide_blocks_gpu=1), ["'decide_blocks_gpu'"]),
    ],
)
def test_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    with pytest.raises(KairoxError) as error:
        load_profile(changed(tmp_path, change))
    assert "changed.toml" in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda d: (d.update(colour=1), d.pop("h2d"))[0])
    with pytest.raises(KairoxError, match=r"missing key 'h2d'.*unknown key 'colour'"):
        load_profile(path)


def test_no_such_profile(tmp_path: Path) -> None:
    with pytest.raises(KairoxError, match=r"'pc11'; did you mean 'pc1.*bundled: emu-pc1, emu-pc1"):
        load_profile("pc11")
    with pytest.raises(KairoxError, match="bundled: pcie3, pcie4, pcie5"):
        load_link("nvlink")
    with pytest.raises(KairoxError, match=r"bundled: emu-pc1, emu-pc1-a.*path of a \.toml"):
        load_profile(tmp_path / "none.toml")
    with pytest.raises(KairoxError, match="no hardware profile"):
        load_profile(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ", encoding="utf-8")
    with pytest.raises(KairoxError, match=r"broken\.toml' is not valid TOML"):
        load_profile(str(broken))


def test_a_name_in_the_working_folder_does_not_shadow_a_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pc1").write_text("not a profile", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_profile("pc1").name == "pc1"


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_profile("pc1").name = "mine"  # type: ignore[misc]


def test_with_link_changes_only_the_link() -> None:
    pc1, gen3 = load_profile("pc1"), load_link("pcie3")
    slow = with_link(pc1, gen3)
    assert slow.name == "pc1+pcie3"
    assert (slow.h2d, slow.d2h) == (gen3.h2d, gen3.d2h)
    update = {"name": "pc1", "h2d": pc1.h2d, "d2h": pc1.d2h}
    assert slow.model_copy(update=update) == pc1
    assert with_link(pc1, load_link("pcie4")).h2d == pc1.h2d


def test_scaled_by_hand() -> None:
    pc1 = load_profile("pc1")
    slow = scaled(pc1, 4.0)
    assert slow.time_scale == 4.0
    assert slow.decide == pc1.decide
    assert slow.h2d.bytes_per_s.value == 24.5e9 / 4
    assert slow.h2d.copy_fixed_s.value == 4 * 6e-6
    assert slow.h2d.bytes_per_s.source.endswith("slowed by time_scale 4")
    before, after = dict(quantities(pc1)), dict(quantities(slow))
    same = {"vram_bytes", "vram_margin_bytes", "copies_per_bundle"}
    same |= {"deterministic.cpu_ratio", "deterministic.gpu_ratio"}
    for key, quantity in before.items():
        if key in same or key.startswith("decide."):
            assert after[key] == quantity
        elif key.endswith(RATES):
            assert after[key].value == quantity.value / 4
        else:
            assert after[key].value == quantity.value * 4
    assert scaled(pc1, 1.0) == pc1


@given(time_scale=st.floats(0.01, 1000), link=st.sampled_from(bundled_links()))
def test_a_link_on_a_slowed_machine_is_slowed_with_it(time_scale: float, link: str) -> None:
    pc1, bus = load_profile("emu-pc1"), load_link(link)
    assert with_link(scaled(pc1, time_scale), bus) == scaled(with_link(pc1, bus), time_scale)


@pytest.mark.parametrize("time_scale", [0.0, -1.0, 1e7, float("nan"), float("inf")])
def test_scaled_refuses(time_scale: float) -> None:
    with pytest.raises(KairoxError, match="above 0"):
        scaled(load_profile("pc1"), time_scale)
