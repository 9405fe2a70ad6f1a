"""The guide's throughput table and time breakdown, row by row (T1 to T8)."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.published.audit_basis import AuditRow, Basis, Verdict, gb, ms, tok
from experiments.published.data import number, table


def _throughput(name: str) -> float:
    return number("guide", "throughput", name)


def within(share_of_bound: float) -> Verdict:
    """Above its bound nothing can be."""
    return "plausible" if share_of_bound <= 1 else "impossible by byte conservation"


def under(said: float, bounds: Mapping[str, float]) -> Verdict:
    """Against a bound per share of neurons, in tokens/s: excluded by all, by none, or by some."""
    excluded = [said > bound for bound in bounds.values()]
    if all(excluded):
        return "impossible by byte conservation"
    return "depends on the share evaluated" if any(excluded) else "plausible"


def llama_row(b: Basis) -> AuditRow:
    said = _throughput("llama.cpp")
    pc1, pc2 = b.pc1, b.pc2
    implied = pc1.llama_host_bytes / (1 / said - pc1.llama_device_s)
    peak = pc1.profile.dram_peak_bytes_per_s
    share = f" ({implied / peak.value:.0%} of its peak)" if peak is not None else ""
    return AuditRow(
        item="T1", subject="llama.cpp, LLaMA-2-13B FP16",
        says=f"{said} tokens/s = {ms(1 / said)} on the RTX 4070 machine",
        own="no constant of the guide's bears on it",
        roofline=(
            f"{pc1.whole_layers} of {pc1.shape.n_layers} layers fit: {ms(pc1.llama_device_s)} on "
            f"the GPU + {gb(pc1.llama_host_bytes)} / {pc1.dram / 1e9:g} GB/s = {ms(pc1.llama_s)} = "
            f"{tok(pc1.llama_s)}. The printed number needs host memory of {implied / 1e9:.1f} GB/s"
            f"{share}; the RTX 3060 / DDR4 machine's roofline is {tok(pc2.llama_s)}"
        ),
        verdict="plausible",
        numbers={
            "roofline_tokens_per_s": 1 / pc1.llama_s, "implied_dram": implied,
            "pc2_tokens_per_s": 1 / pc2.llama_s, "whole_layers": pc1.whole_layers,
        },
    )  # fmt: skip


def powerinfer_row(b: Basis, name: str, item: str) -> AuditRow:
    said, pc1 = _throughput(name), b.pc1
    bounds = {"true": pc1.static_s(b.true_share), "predicted": pc1.static_s(b.predicted_share)}
    return AuditRow(
        item=item, subject=f"{name}, LLaMA-2-13B FP16",
        says=f"{said} tokens/s = {ms(1 / said)}",
        own="see T6 for its breakdown",
        roofline=(
            f"a static hot set of {gb(pc1.cached_bytes)} ({pc1.slots} a layer), every byte of it "
            f"used: {ms(bounds['predicted'])} = {tok(bounds['predicted'])} with the predicted set "
            f"({b.predicted_share:.1%}), {tok(bounds['true'])} with the true one "
            f"({b.true_share:.1%}); printed is {said * bounds['predicted']:.0%} of the bound"
        ),
        verdict=within(said * bounds["predicted"]),
        numbers={f"{k}_tokens_per_s": 1 / v for k, v in bounds.items()},
    )  # fmt: skip


def neuralink_row(b: Basis) -> AuditRow:
    said, pc1 = _throughput("Neuralink"), b.pc1
    small = table("paper", "pcie")["single_neuron"][1] * 1e9
    full = (pc1.eager_s(b.predicted_share), pc1.eager_s(b.true_share))
    slow = (pc1.eager_s(b.predicted_share, small), pc1.eager_s(b.true_share, small))
    return AuditRow(
        item="T4", subject="Neuralink (eager load), LLaMA-2-13B FP16",
        says=f"{said} tokens/s = {ms(1 / said)}",
        own="no constant of the guide's bears on it",
        roofline=(
            f"copy everything missing: {tok(full[0])} (predicted set) to {tok(full[1])} (true) at "
            f"{pc1.link / 1e9:g} GB/s; {tok(slow[0])} to {tok(slow[1])} at the "
            f"{small / 1e9:g} GB/s that single neurons reach (OSDI '26, table 2): the number needs "
            "grouped copies"
        ),
        verdict="plausible",
        numbers={"full_predicted": 1 / full[0], "full_true": 1 / full[1],
                 "small_predicted": 1 / slow[0], "small_true": 1 / slow[1]},
    )  # fmt: skip


def kairox_row(b: Basis) -> AuditRow:
    said, pc1 = _throughput("Kairox"), b.pc1
    shares = {"predicted": b.predicted_share, "guide": b.guide_share, "true": b.true_share}
    bound = {name: pc1.any_policy_s(share) for name, share in shares.items()}
    speeds = {name: 1 / seconds for name, seconds in bound.items()}
    loose = tok(b.pc1_unfitted.any_policy_s(b.guide_share))
    verb = {name: "excludes" if said > speed else "does not exclude"
            for name, speed in speeds.items()}  # fmt: skip
    margins = (pc1.profile.vram_margin_bytes.value, b.pc1_unfitted.profile.vram_margin_bytes.value)
    return AuditRow(
        item="T5", subject="Kairox, LLaMA-2-13B FP16",
        says=f"{said} tokens/s = {ms(1 / said)}",
        own=(
            "its breakdown sums to it, and that breakdown cannot be (T6). With its own "
            f"{b.guide_share:.0%} of neurons active, a predictor without one false alarm and all "
            f"host traffic hidden, {tok(bound['guide'])} is the most with a margin of "
            f"{gb(margins[0])} of VRAM (fitted; it {verb['guide']} the number) and {loose} with "
            f"{gb(margins[1])} (the profile's)"
        ),
        roofline=(
            "any policy at all, every cached byte used every token and all host traffic hidden: "
            f"{tok(bound['predicted'])} with the predicted set ({b.predicted_share:.1%} = "
            f"{gb(pc1.ffn_bytes(b.predicted_share))}; measured on 7B, assumed for 13B), which "
            f"{verb['predicted']} it; "
            f"{tok(bound['true'])} if only what fires were ({b.true_share:.1%} = "
            f"{gb(pc1.ffn_bytes(b.true_share))}), which {verb['true']} it. What bytes forbid "
            "whatever the share is its time breakdown (T6)"
        ),
        verdict=under(said, speeds),
        numbers={f"{name}_tokens_per_s": speed for name, speed in speeds.items()},
    )  # fmt: skip


def breakdown_row(b: Basis) -> AuditRow:
    pc1, bars = b.pc1, table("guide", "time_breakdown")
    link = number("guide", "hardware_box", "link") * 1e9
    parts = {
        "cached": pc1.cached_bytes,
        "prefetched": bars["kairox_prefetch"] * 1e-3 * link,
        "by the CPU": bars["kairox_cpu"] * 1e-3 * pc1.dram,
    }
    have = sum(parts.values())
    needs = {f"{share:.1%}": pc1.ffn_bytes(share)
             for share in (b.true_share, b.guide_share, b.predicted_share)}  # fmt: skip
    return AuditRow(
        item="T6", subject="Kairox's 31.3 ms: byte conservation",
        says=(
            f"GPU {bars['kairox_gpu']} ms + CPU {bars['kairox_cpu']} ms, "
            f"{bars['kairox_prefetch']:g} ms of prefetch hidden"
        ),
        own=" + ".join(f"{name} {gb(n)}" for name, n in parts.items()) + f" = {gb(have)} a token",
        roofline=(
            "needed: " + ", ".join(f"{gb(n)} ({share} of neurons)" for share, n in needs.items())
            + f"; short by {gb(min(needs.values()) - have)} to {gb(max(needs.values()) - have)}, "
            "even with every cached neuron used every token"
        ),
        verdict="impossible by byte conservation" if have < min(needs.values()) else "plausible",
        numbers={"have": have, "need_least": min(needs.values()), "need_most": max(needs.values())},
    )  # fmt: skip


def gpu_18_row(b: Basis) -> AuditRow:
    pc1, said = b.pc1, number("guide", "time_breakdown", "powerinfer_gpu") * 1e-3
    peak = number("datasheets", "gpu_memory", "rtx4070") * 1e9
    shape = pc1.shape
    attention = shape.n_layers * shape.attention_bytes
    more = attention + shape.head_bytes + shape.n_layers * shape.predictor_bytes
    return AuditRow(
        item="T7", subject="PowerInfer: 18 ms of GPU",
        says=f"{ms(said)}",
        own="no constant of the guide's bears on it",
        roofline=(
            f"attention weights alone: {gb(attention)} / {ms(said)} = {attention / said / 1e9:.0f} "
            f"GB/s = {attention / said / peak:.0%} of {peak / 1e9:g}; with head and predictor "
            f"{more / said / 1e9:.0f} GB/s = {more / said / peak:.0%}. Right order, not possible"
        ),
        verdict="impossible by byte conservation" if more / said > peak else "plausible",
        numbers={"attention_of_peak": attention / said / peak, "more_of_peak": more / said / peak},
    )  # fmt: skip


def pc2_row(b: Basis) -> AuditRow:
    pc2 = b.pc2
    static = (pc2.static_s(b.predicted_share), pc2.static_s(b.true_share))
    every = (pc2.any_policy_s(b.predicted_share), pc2.any_policy_s(b.true_share))
    geomean = (number("guide", "speed_up_of_kairox", "geomean_pc1"),
               number("guide", "speed_up_of_kairox", "geomean_pc2"))  # fmt: skip
    return AuditRow(
        item="T8", subject="the second machine (RTX 3060, PCIe 3.0, DDR4)",
        says=f"geometric mean over llama.cpp {geomean[1]}x; {geomean[0]}x on the first machine",
        own="no absolute number is printed for it",
        roofline=(
            f"13B: llama.cpp {tok(pc2.llama_s)}, dense part {ms(pc2.floor_s)}, static placement "
            f"{tok(static[0])} to {tok(static[1])}, any policy {tok(every[0])} to {tok(every[1])}"
        ),
        verdict="not checkable",
        numbers={"floor_s": pc2.floor_s, "any_predicted": 1 / every[0], "any_true": 1 / every[1]},
    )  # fmt: skip


def rows(b: Basis) -> list[AuditRow]:
    """T1 to T8."""
    return [
        llama_row(b), powerinfer_row(b, "PowerInfer", "T2"), powerinfer_row(b, "Q-Infer", "T3"),
        neuralink_row(b), kairox_row(b), breakdown_row(b), gpu_18_row(b), pc2_row(b),
    ]  # fmt: skip
