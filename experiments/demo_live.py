"""The demo's last act: the best setting of the sweep and the best of each other rule, live."""

import json
from pathlib import Path

import pandas as pd

from kairox_exec.as_run import kind_of
from kairox_exec.calibration import Calibration
from kairox_exec.live import set_threads
from kairox_exec.live_run import ForcedText, machine_for
from kairox_exec.validation import validate
from kairox_sim.commands.options import progress
from kairox_sim.commands.validate import print_validation
from kairox_sim.settings import Settings, label
from kairox_sim.trace import read_trace

HERE = Path(__file__).parent
MODEL, EMULATED = HERE / "models" / "tiny-reglu", "emu-pc1"
DOMAINS = [HERE / "prompts" / f"{name}.txt" for name in ("prose", "code", "json", "html", "math")]
REPEATS = 2  # `make validate` makes five, of more tokens


def chosen(table: pd.DataFrame, best: Settings) -> tuple[list[Settings], dict[str, float]]:
    """The best setting first, then the fastest of every other rule; what the sweep said of each."""
    rows = table[table["link"].isna() & (table["status"] == "ok")]
    rows = rows.sort_values(["tok_s", "label"], ascending=[False, True])
    settings, swept, rules = [], {}, set()
    for row in rows.to_dict(orient="records"):
        setting = Settings.of(json.loads(row["settings"]))
        swept[label(setting)] = row["tok_s"]
        rule = (setting.policy, setting.controller, setting.trigger, setting.late)
        if rule not in rules:
            rules.add(rule)
            settings.append(setting)
    first = [one for one in settings if label(one) == label(best)]
    return first + [one for one in settings if label(one) != label(best)], swept


def run_live(out: Path, table: pd.DataFrame, *, prior: Path, hardware: Path) -> Path:
    """Run them live on the emulated machine, print the table; returns the table on disk."""
    set_threads(1)
    calibration = Calibration.load(hardware)
    settings, swept = chosen(table, Settings.load(out / "best.toml"))
    machine = machine_for(
        MODEL,
        "emulated",
        emulate=EMULATED,
        kind=kind_of(settings),
        time_scale=calibration.profile.time_scale,
    )
    # Every domain, a short window each: 24 decode steps after a prefill of 16.
    text = ForcedText(DOMAINS, tokens=40, prefill=16, window=40)
    with progress() as bar:
        task = bar.add_task("running live", total=None)
        result = validate(
            MODEL,
            settings,
            text,
            calibration,
            machine,
            out / "live",
            prior=read_trace(prior),
            repeats=REPEATS,
            swept_tok_s=swept,
            on_progress=lambda what, done, of: bar.update(
                task, description=what, completed=done, total=of
            ),
        )
    written = result.dump(out / "live")
    print_validation(result, out / "live")
    return written[1]
