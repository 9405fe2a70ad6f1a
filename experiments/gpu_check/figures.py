"""Two figures of a check's results, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any


def draw(folder: Path) -> str:
    """What was drawn, or why nothing was."""
    if importlib.util.find_spec("matplotlib") is None:
        return "figures: none, matplotlib is not installed; --finish draws them later"
    import matplotlib

    matplotlib.use("agg")
    drawn = []
    for name, figure in (("links", _links), ("large", _large)):
        path = folder / f"{name}.json"
        content = json.loads(path.read_text()) if path.is_file() else {}
        if content.get("rows") or content.get("runs"):
            drawn.append(str(figure(content, folder / f"{name}.png")))
    return f"figures: {', '.join(drawn) or 'none, no results to draw'}"


def _links(content: dict[str, Any], path: Path) -> Path:
    """Bytes per second against the number of rows, a panel for each size of row."""
    from matplotlib.figure import Figure

    rows = [row for row in content["rows"] if row["memory"] == "registered"]
    sizes = sorted({row["row_bytes"] for row in rows})
    figure = Figure(figsize=(3.2 * len(sizes), 3.4), layout="constrained")
    axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axis, row_bytes in zip(axes, sizes, strict=True):
        here = [row for row in rows if row["row_bytes"] == row_bytes]
        for way in dict.fromkeys(row["way"] for row in here):
            points = [(r["n_rows"], r["idle_bytes_per_s"] / 1e9) for r in here if r["way"] == way]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=way)
        axis.set(xscale="log", xlabel="rows", title=f"{row_bytes / 1024:g} KiB a row")
    axes[0].set_ylabel("GB/s, idle card")
    axes[-1].legend(fontsize=6)
    figure.suptitle(f"Host to device, registered memory; {content['label']}", fontsize=8)
    figure.savefig(path, dpi=150)
    return path


def _large(content: dict[str, Any], path: Path) -> Path:
    """Busy time of GPU, host and link beside the time of a token, run by run."""
    from matplotlib.figure import Figure

    runs = content["runs"]
    figure = Figure(figsize=(7, 0.5 * len(runs) + 1.6), layout="constrained")
    axis = figure.subplots()
    parts = {"token": "wall_s", "T_gpu": "gpu_busy_s", "T_cpu": "cpu_busy_s", "T_io": "swap_busy_s"}
    for at, (name, key) in enumerate(parts.items()):
        places = [run + (at - 1.5) * 0.2 for run in range(len(runs))]
        axis.barh(places, [1e3 * run["means"][key] for run in runs], height=0.2, label=name)
    axis.set_yticks(range(len(runs)), [run["run"] for run in runs], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ms per decode token")
    axis.legend(fontsize=7)
    figure.suptitle(f"7B shape, synthetic activations; {content['label']}", fontsize=8)
    figure.savefig(path, dpi=150)
    return path
