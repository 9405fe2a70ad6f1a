"""The guide's controller, its momentum and its listing (items 20 to 30), on our own objects."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log

import numpy as np

from experiments.published.audit_basis import AuditRow, Basis, Verdict
from experiments.published.data import number, table
from experiments.published.guide_listing import demo_case, replay
from kairox_sim.controllers import Anb
from kairox_sim.policies import Tam
from kairox_sim.record import StepRecord
from kairox_sim.workload_presets import PRESETS


def scale_after(n_steps: int, *, gpu_ms: float, cpu_ms: float, io_ms: float) -> float:
    """ANB's threshold_scale after so many equal steps from 1."""
    anb = Anb()
    record = StepRecord.with_unknown(
        gpu_busy_s=gpu_ms * 1e-3, cpu_busy_s=cpu_ms * 1e-3, swap_busy_s=io_ms * 1e-3
    )
    for _ in range(n_steps):
        anb.update(record)
    return anb.knobs.threshold_scale


def momentum_after(hits: int, beta: float = 0.9) -> float:
    """TAM's momentum of a neuron that fired so many times in a row, from zero."""
    tam = Tam(1, 1, beta=beta)
    for _ in range(hits):
        tam.observe(0, np.array([0], np.int32), None)
    return float(tam.momentum[0, 0])


def hits_to_reach(threshold: float, beta: float = 0.9) -> int:
    """Consecutive hits until the momentum is at least `threshold`."""
    hits = 1
    while momentum_after(hits, beta) < threshold:
        hits += 1
    return hits


def _row(
    item: str, subject: str, says: str, own: str, roofline: str, verdict: Verdict, **numbers: float
) -> AuditRow:
    return AuditRow(
        item=item, subject=subject, says=says, own=own, roofline=roofline, verdict=verdict,
        numbers=numbers,
    )  # fmt: skip


def gamma_row() -> AuditRow:
    cpu_bound = scale_after(1, gpu_ms=8.5, cpu_ms=10.8, io_ms=0)
    return _row(
        "20", "what gamma is",
        "a box: the migration threshold; the text: the balancing intensity, more is more "
        "migration; "
        "code: `modifier` times theta_promote",
        f"with a slow CPU its code goes from 1 to {cpu_bound:.4f}: down, for more migration. So "
        "modifier moves against the intensity, and the signs agree only for gamma = 1 / modifier",
        "not a matter of bytes", "contradicts itself",
        scale=cpu_bound,
    )  # fmt: skip


def law_row() -> AuditRow:
    a = table("guide", "listing_anb")
    steps = 0
    while scale_after(steps, gpu_ms=0, cpu_ms=1e6, io_ms=0) > a["lowest"] + 1e-12:
        steps += 1
    delta_ms = 10.8 - 8.5
    prose = a["eta_up"] * delta_ms
    code = a["eta_up"] * delta_ms / 10.8
    return _row(
        "21", "text law against code",
        "text: gamma +- eta x delta, delta in ms; code: delta / T_cpu, and (T_io - T_gpu) / T_io",
        f"for T_cpu 10.8, T_gpu 8.5 ms the text moves by {prose:.3f}, the code by {code:.4f}. The "
        f"code moves at most {a['eta_up']} / {a['eta_down']} a token: {steps} tokens from 1.0 to "
        f"{a['lowest']}",
        "not a matter of bytes", "contradicts itself",
        steps=steps, prose=prose, code=code,
    )  # fmt: skip


def ratchet_row() -> AuditRow:
    saturated = scale_after(20, gpu_ms=5, cpu_ms=12, io_ms=11)
    down = scale_after(5, gpu_ms=5, cpu_ms=12, io_ms=0)
    anb = Anb(initial=down)
    quiet = StepRecord.with_unknown(gpu_busy_s=8e-3, cpu_busy_s=1e-3, swap_busy_s=4e-3)
    for _ in range(100):
        anb.update(quiet)
    relaxed = anb.knobs.threshold_scale
    return _row(
        "22", "'unused PCIe capacity exists' whenever the CPU is slower",
        "delta = T_cpu - max(T_gpu, T_io) > 0: promote more; one modifier for all layers",
        "T_gpu 5, T_io 11, T_cpu 12 ms: the link is the second slowest and beyond the GPU, and "
        "the "
        f"scale still falls to {saturated:.3f} in 20 tokens. After the CPU has become the fastest "
        f"side (T_cpu 1, T_io 4, T_gpu 8 ms) it stays at {relaxed:.3f} for 100 tokens: a ratchet",
        "the paper's controller is per layer and moves both ways every step", "contradicts itself",
        saturated=saturated, before=down, after=relaxed,
    )  # fmt: skip


def paper_controller_row() -> AuditRow:
    rate = number("paper", "released_code", "swap_cap_step")
    return _row(
        "23", "what ANB moves",
        "the promotion threshold, additively",
        "threshold_scale x theta_promote",
        f"the paper multiplies the decay of each layer by 1 +- alpha; its released code keeps the "
        f"decay at {number('paper', 'released_code', 'decay')} and multiplies the number of swaps "
        "by "
        f"1 +- {rate}. Both are separate controllers here (`paper`, `swap_cap`)",
        "contradicts its source",
        rate=rate,
    )  # fmt: skip


def five_hits_row() -> AuditRow:
    t = table("guide", "listing_tam")
    promote = t["theta_promote"]
    plain = hits_to_reach(promote)
    line = replay(demo_case())
    first = next(x.step for x in line if x.promoted)
    scale = line[first - 2].modifier
    decay = number("paper", "released_code", "decay")
    paper = hits_to_reach((1 - decay) * (1 + 1e-6), decay)
    return _row(
        "24", "hits until a neuron is promoted",
        f"beta {t['beta']}, theta {promote}: a neuron needs five hits in a row",
        f"M = {momentum_after(4):.4f} after four, {momentum_after(5):.4f} after five: {plain} "
        "hits. "
        f"But with its own modifier of {scale:.3f} the threshold is {promote * scale:.3f} and the "
        f"demo promotes at step {first}",
        f"the paper's filter (decay {decay}, tau just above 1 - decay) needs {paper}",
        "contradicts itself",
        plain=plain, demo=first, paper=paper, threshold=promote * scale,
    )  # fmt: skip


def filling_row() -> AuditRow:
    t = table("guide", "listing_tam")
    mean_run = ceil(log(1 - t["theta_promote"]) / log(t["beta"]))
    rates = PRESETS["prosparse-13b"].active.quantiles(100_000)
    often = rates[rates >= t["theta_promote"]]
    rare, carried = often.size / rates.size, float(often.sum() / rates.sum())
    stay = log(t["theta_evict"] / t["theta_promote"]) / log(t["beta"])
    return _row(
        "25", "what the promotion rule keeps",
        "hot neurons are promoted, cold ones evicted; slots adapt",
        f"in the mean M is the firing rate, so theta_promote {t['theta_promote']} asks for a "
        "neuron "
        f"that fires in {t['theta_promote']:.0%} of tokens; it fills by runs of {mean_run} hits "
        "and "
        f"then keeps a neuron for {stay:.0f} silent tokens. A full cache replaces nothing that is "
        "above theta_evict: lock-in",
        f"with ProSparse-like skew {rare:.1%} of the neurons fire in at least "
        f"{t['theta_promote']:.0%} of tokens, and carry {carried:.0%} of all activations "
        "(synthetic "
        "rates)",
        "not checkable",
        silent_tokens=stay, run=mean_run, rare=rare, carried=carried,
    )  # fmt: skip


def same_step_row() -> AuditRow:
    lines = replay(demo_case())
    at = next(x for x in lines if x.promoted)
    return _row(
        "26", "hits of what was loaded in the same step",
        "hit rate after promotion; no predictor, no pipeline, no late copy, no layer structure",
        f"step {at.step}: {at.hit_percent:.1f} % counted, {at.before_percent:.1f} % resident "
        "before. "
        "Momentum is updated with the true set of this very step: a prediction without error or "
        "delay, and any number of loads a step",
        f"its {at.promoted} loads take {at.t_io_ms:.2f} ms by its own constants, "
        f"{at.t_gpu_ms:.2f} ms of GPU time beside", "contradicts itself",
        counted=at.hit_percent, before=at.before_percent,
    )  # fmt: skip


def duplicates_row() -> AuditRow:
    momentum = np.zeros(4, np.float32)
    momentum[np.array([1, 1, 1])] += np.float32(0.1)  # as the listing writes it
    return _row(
        "27", "fancy-index += and a scan in Python",
        "momentum[ids] += 1 - beta",
        f"three copies of one id add {momentum[1]:.1f}, not 0.3: duplicates are dropped. Harmless "
        "for ids that are unique, as its own are",
        "a Python loop over every neuron of every layer and token; here it is one array operation",
        "follows",
        added=float(momentum[1]),
    )  # fmt: skip


def printed_row() -> AuditRow:
    lines = replay(demo_case())
    demo = table("guide", "listing_demo")
    baked = demo["sustained_per_layer"] / demo["active_per_layer"]
    changes = sum(abs(a.modifier - b.modifier) > 1e-12 for a, b in pairwise(lines[3:]))
    return _row(
        "28", "the listing's output",
        "83.3 % hits from step 4 on; an adaptive balancer",
        "as published it has no indentation and does not run; re-indented it prints what "
        f"experiments/published/guide_listing.py prints: {lines[3].promoted} promoted at step 4, "
        f"nothing after. {demo['sustained_per_layer']} / {demo['active_per_layer']} = {baked:.1%} "
        "is "
        f"in its inputs; the balancer moves {changes} times after step 4",
        "not a matter of bytes", "contradicts itself",
        baked=baked, changes=changes,
    )  # fmt: skip


def comments_row() -> AuditRow:
    demo = table("guide", "listing_demo")
    part = demo["sustained_per_layer"] / demo["active_per_layer"]
    sets = [set(map(int, step["layers"][0]["promote"])) for step in demo_case()["steps"]]
    moved = [ids for ids in sets if ids]
    return _row(
        "29", "comments of the listing",
        f"'simulate {demo['promised_steps']} steps', '{demo['sustained_percent']} % sustained', "
        "'shifting activation patterns'; a class NeuronMetadata",
        f"range(1, 11) is {demo['run_steps']} steps; {demo['sustained_per_layer']} of "
        f"{demo['active_per_layer']} is {part:.1%}; what is promoted is promoted {len(moved)} "
        "time: "
        "the sustained set never shifts; NeuronMetadata is not used; 8.5 ms of GPU whatever the "
        "number of layers",
        "not a matter of bytes", "contradicts itself",
        sustained=part, promotions=len(moved),
    )  # fmt: skip


def layers_row(b: Basis) -> AuditRow:
    n, total = b.pc1.whole_layers, b.pc1.shape.n_layers
    return _row(
        "30", "which layers llama.cpp puts on the GPU",
        "layers 0-18 on the GPU, 19-39 on the CPU; OSDI '26 pages 1839-1856",
        "no matter for its times",
        "`-ngl N` offloads the last N layers (llama.cpp, src/llama-model.cpp, i_gpu_start = "
        "n_layer "
        f"- ngl); by our memory plan {n} of {total} fit, layers {total - n}-{total - 1}. The page "
        "numbers were not checked", "contradicts its source",
        first=total - n, fit=n,
    )  # fmt: skip


def rows(b: Basis) -> list[AuditRow]:
    """Items 20 to 30."""
    return [
        gamma_row(), law_row(), ratchet_row(), paper_controller_row(), five_hits_row(),
        filling_row(), same_step_row(), duplicates_row(), printed_row(), comments_row(),
        layers_row(b),
    ]  # fmt: skip
