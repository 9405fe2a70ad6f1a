"""What the guide's numbers say of each other (items 1 to 11): arithmetic, sizes, memory."""

from __future__ import annotations

from experiments.published.audit_basis import AuditRow, Basis, Machine, gb
from experiments.published.data import number, table
from kairox_sim.memory import fits


def _throughput(name: str) -> float:
    return number("guide", "throughput", name)


def ratio_row(b: Basis) -> AuditRow:
    llama, kairox, pi = (_throughput(n) for n in ("llama.cpp", "Kairox", "PowerInfer"))
    said = number("guide", "speed_up_over_llama", "Kairox")
    return AuditRow(
        item="1", subject="Kairox over llama.cpp",
        says=f"{kairox} / {llama} tokens/s printed as {said}x",
        own=(
            f"{kairox} / {llama} = {kairox / llama:.2f}x; {said}x would need "
            f"{said * llama:.2f} tokens/s, or a llama.cpp of {kairox / said:.2f}. "
            f"{pi} x {number('guide', 'speed_up_over_powerinfer', 'Kairox')} = "
            f"{pi * number('guide', 'speed_up_over_powerinfer', 'Kairox'):.2f}: the throughput was "
            "computed back from the ratio to PowerInfer"
        ),
        roofline="see T1 and T5",
        verdict="contradicts itself",
        numbers={"ratio": kairox / llama, "back": kairox / said, "forth": said * llama},
    )  # fmt: skip


def other_ratios_row(b: Basis) -> AuditRow:
    kairox = _throughput("Kairox")
    pairs = {
        "Neuralink": number("guide", "speed_up_of_kairox", "over_neuralink"),
        "Q-Infer": number("guide", "speed_up_of_kairox", "over_qinfer"),
    }
    ratios = {name: kairox / _throughput(name) for name in pairs}
    return AuditRow(
        item="2", subject="Kairox over Neuralink and Q-Infer",
        says=", ".join(f"{said}x over {name}" for name, said in pairs.items()) + ", in one row",
        own=", ".join(f"{kairox} / {_throughput(n)} = {r:.2f}x" for n, r in ratios.items()),
        roofline=(
            "in the OSDI '26 paper these are maxima over different models and machines "
            f"({number('paper', 'best_over', 'neuralink_pc_low')}x, "
            f"{number('paper', 'best_over', 'qinfer_pc_low')}x), not one row"
        ),
        verdict="contradicts itself",
        numbers={name.lower(): ratio for name, ratio in ratios.items()},
    )  # fmt: skip


def serial_row(b: Basis) -> AuditRow:
    t = table("guide", "time_breakdown")
    overlapped = max(t["kairox_gpu"], t["kairox_cpu"])
    return AuditRow(
        item="3", subject="bars against 'GPU and CPU work at the same time'",
        says=f"{t['powerinfer_total']:g} ms and {t['kairox_total']} ms in total; they overlap",
        own=(
            f"{t['powerinfer_gpu']:g} + {t['powerinfer_cpu']:g} = "
            f"{t['powerinfer_gpu'] + t['powerinfer_cpu']:g} ms and {t['kairox_gpu']} + "
            f"{t['kairox_cpu']} = {t['kairox_gpu'] + t['kairox_cpu']:.1f} ms: added, not "
            f"overlapped. Overlapped, Kairox would take {overlapped} ms = "
            f"{1e3 / overlapped:.1f} tokens/s"
        ),
        roofline="see T6",
        verdict="contradicts itself",
        numbers={"overlapped_tokens_per_s": 1e3 / overlapped,
                 "kairox_sum": t["kairox_gpu"] + t["kairox_cpu"]},
    )  # fmt: skip


def residual_row(b: Basis) -> AuditRow:
    t, pc1 = table("guide", "time_breakdown"), b.pc1
    each = number("guide", "listing_time", "cpu_per_residual")
    n_layers = pc1.shape.n_layers
    active = n_layers * pc1.active(b.true_share)
    residual, static = t["kairox_cpu"] / each, t["powerinfer_cpu"] / each
    hit = 1 - residual / active
    return AuditRow(
        item="4", subject="CPU time against hit rate",
        says=(
            f"{t['kairox_cpu']} ms of residual work; hit rate "
            f"{number('guide', 'hit_rate', 'kairox_low')}-"
            f"{number('guide', 'hit_rate', 'kairox_high')} %"
        ),
        own=(
            f"{t['kairox_cpu']} ms / {each * 1e3:g} us = {residual:.0f} neurons a token = "
            f"{residual / n_layers:.1f} a layer of {pc1.active(b.true_share):,.0f}: a hit rate of "
            f"{hit:.1%}. PowerInfer's {t['powerinfer_cpu']:g} ms are {static:,.0f} neurons a token "
            f"= {static / n_layers:.0f} a layer = {static / active:.0%} of those active"
        ),
        roofline=(
            f"at {pc1.dram / 1e9:g} GB/s {t['kairox_cpu']} ms read "
            f"{t['kairox_cpu'] * 1e-3 * pc1.dram / pc1.shape.neuron_bytes / n_layers:.0f} neurons "
            "a "
            "layer"
        ),
        verdict="contradicts itself",
        numbers={"residual": residual, "hit": hit, "powerinfer_per_layer": static / n_layers},
    )  # fmt: skip


def burst_row(b: Basis) -> AuditRow:
    n, said = (number("guide", "burst", k) for k in ("cold_neurons", "more_than"))
    each_us = number("guide", "listing_time", "cpu_per_residual") * 1e3
    pc1 = b.pc1
    roof_us = pc1.shape.neuron_bytes / pc1.dram * 1e6
    return AuditRow(
        item="5", subject="a burst of cold neurons",
        says=f"{n:,.0f} cold neurons take more than {said:g} ms",
        own=(
            f"{said:g} ms / {n:,.0f} = {1e3 * said / n:.0f} us a neuron; its listing has "
            f"{each_us:g} us, which gives {n * each_us / 1e3:.1f} ms"
        ),
        roofline=(
            f"{pc1.shape.neuron_bytes:,} B / {pc1.dram / 1e9:g} GB/s = {roof_us:.2f} us, "
            f"{n * roof_us / 1e3:.2f} ms for all; {each_us:g} us is "
            f"{pc1.shape.neuron_bytes / each_us / 1e3:.1f} GB/s, {each_us / roof_us:.0f} times "
            "slower than the memory"
        ),
        verdict="contradicts itself",
        numbers={"us_said": 1e3 * said / n, "us_roofline": roof_us, "slower": each_us / roof_us},
    )  # fmt: skip


def constants_row(b: Basis) -> AuditRow:
    t, pc1 = table("guide", "listing_time"), b.pc1
    n_bytes = pc1.shape.neuron_bytes
    active = pc1.shape.n_layers * pc1.active(b.true_share)
    hits = 0.9 * active
    t_gpu, t_cpu = t["gpu_base"] + t["gpu_per_hit"] * hits, t["cpu_per_residual"] * (active - hits)
    return AuditRow(
        item="6", subject="its constants against its bars",
        says=f"{t['gpu_per_hit'] * 1e3:g} us a hit, {t['io_per_load'] * 1e3:g} us a load",
        own=(
            f"{active:,.0f} active neurons a token at 90 % hits: T_GPU = {t_gpu:.0f} ms, T_CPU = "
            f"{t_cpu:.0f} ms; its bars show {number('guide', 'time_breakdown', 'kairox_gpu')} and "
            f"{number('guide', 'time_breakdown', 'kairox_cpu')} ms"
        ),
        roofline=(
            f"a hit {n_bytes / pc1.gpu * 1e6:.2f} us, a load {n_bytes / pc1.link * 1e6:.2f} us "
            f"({n_bytes:,} B over {pc1.gpu / 1e9:.0f} and {pc1.link / 1e9:g} GB/s)"
        ),
        verdict="contradicts itself",
        numbers={"t_gpu_ms": t_gpu, "t_cpu_ms": t_cpu, "hit_us": n_bytes / pc1.gpu * 1e6,
                 "load_us": n_bytes / pc1.link * 1e6},
    )  # fmt: skip


def size_row(b: Basis, seven: Machine, opt: Machine) -> AuditRow:
    said = number("guide", "moves", "megabytes")
    link = number("guide", "hardware_box", "link") * 1e9
    sizes = {m.shape.name: 1000 * m.shape.neuron_bytes for m in (opt, seven, b.pc1)}
    large = sizes[b.pc1.shape.name]
    return AuditRow(
        item="7", subject="the size of 1,000 neurons",
        says=f"about {said:g} MB, {number('guide', 'moves', 'low_ms')}-"
        f"{number('guide', 'moves', 'high_ms'):g} ms",
        own=(
            f"{said:g} MB / {number('guide', 'moves', 'low_ms')} ms = "
            f"{said / number('guide', 'moves', 'low_ms'):.0f} GB/s"
        ),
        roofline=(
            ", ".join(f"{name} {n / 1e6:.1f} MB" for name, n in sizes.items())
            + f" in FP16; the guide's own 13B takes {large / link * 1e3:.2f} ms at "
            f"{link / 1e9:g} GB/s"
        ),
        verdict="contradicts itself",
        numbers={**{f"mb_{k}": v / 1e6 for k, v in sizes.items()}, "ms_13b": large / link * 1e3},
    )  # fmt: skip


def slots_row(b: Basis, seven: Machine) -> AuditRow:
    m = table("guide", "memory")
    low, high = m["slots_low"], m["slots_high"]

    def total(machine: Machine, slots: float, n_bytes: float) -> float:
        return machine.shape.n_layers * slots * n_bytes

    fp16 = [total(b.pc1, s, b.pc1.shape.neuron_bytes) for s in (low, high)]
    small = [total(seven, s, seven.shape.neuron_bytes) for s in (low, high)]
    q4 = [total(b.pc1, s, b.quarter_bytes) for s in (low, high)]
    layer = [low * b.pc1.shape.neuron_bytes, high * b.pc1.shape.neuron_bytes]
    return AuditRow(
        item="8", subject="memory of the neuron cache",
        says=(
            f"{low:,}-{high:,} slots a layer, {m['megabytes_low']:g}-{m['megabytes_high']:g} MB of "
            f"VRAM; 'about {m['runbook_overhead_megabytes']:g} MB' in the runbook"
        ),
        own=f"{layer[0] / 1e6:.0f}-{layer[1] / 1e6:.0f} MB for one layer of its 13B",
        roofline=(
            f"all layers, FP16: 13B {gb(fp16[0])}-{gb(fp16[1])}, 7B {gb(small[0])}-{gb(small[1])}; "
            f"13B in Q4_0 {gb(q4[0])}-{gb(q4[1])}; on its 12 GB {b.pc1.slots} a layer "
            f"({b.pc1.slots / b.pc1.shape.n_neurons:.1%}) fit beside the rest"
        ),
        verdict="impossible by byte conservation",
        numbers={"gb_low": fp16[0] / 1e9, "gb_high": fp16[1] / 1e9, "slots_that_fit": b.pc1.slots,
                 "q4_low": q4[0] / 1e9, "q4_high": q4[1] / 1e9},
    )  # fmt: skip


def prefetch_row(b: Basis) -> AuditRow:
    pc1 = b.pc1
    link = number("guide", "hardware_box", "link") * 1e9
    moved = number("guide", "time_breakdown", "kairox_prefetch") * 1e-3 * link
    per_layer = moved / pc1.shape.neuron_bytes / pc1.shape.n_layers
    seen = table("fork", "rtx_3080")["loads_per_layer_step"]
    return AuditRow(
        item="9", subject="14 ms of prefetch",
        says=f"{number('guide', 'time_breakdown', 'kairox_prefetch'):g} ms a token, hidden",
        own=f"at its {link / 1e9:g} GB/s: {moved / 1e6:.0f} MB = {per_layer:.0f} neurons a layer",
        roofline=(
            f"of the order that a fork of the artifact loads ({min(seen)}-{max(seen)} a layer and "
            f"token); with {pc1.slots} slots a layer it cannot carry "
            f"{pc1.active(b.true_share):,.0f} active ones (T6)"
        ),
        verdict="plausible",
        numbers={"megabytes": moved / 1e6, "per_layer": per_layer},
    )  # fmt: skip


def vram_row(b: Basis) -> AuditRow:
    slots, pc1 = int(number("guide", "memory", "slots_runbook")), b.pc1
    plan = fits(pc1.profile, pc1.shape, "predicted", slots, 1024)
    shape = pc1.shape
    ffn = shape.n_layers * shape.n_neurons * shape.neuron_bytes
    model = shape.n_layers * shape.attention_bytes + ffn + shape.head_bytes + shape.embedding_bytes
    return AuditRow(
        item="10", subject="13B in FP16 on 12 GB, 3,000 slots a layer",
        says=f"{number('guide', 'memory', 'vram_gigabytes'):g} GB of VRAM, "
        f"{number('guide', 'memory', 'host_ram_gigabytes'):g} GB of host memory",
        own=f"the model is {gb(model)}, all of it pinned in host memory",
        roofline=plan.explain(),
        verdict="impossible by byte conservation" if not plan.fits else "follows",
        numbers={"needs_gb": plan.total / 1e9, "model_gb": model / 1e9,
                 "without_margin_gb": (plan.total - plan.margin) / 1e9},
    )  # fmt: skip


def hardware_row(b: Basis) -> AuditRow:
    sheet, box = table("datasheets", "gpu_memory"), table("guide", "hardware_box")
    real = {name: sheet[name] for name in ("rtx3080", "rtx4070", "rtx4080")}
    pc1 = b.pc1
    flops, n_bytes = pc1.shape.bundle_flops("predicted"), pc1.shape.neuron_bytes
    bound = {"CPU": (flops / pc1.profile.cpu_flops_per_s.value, n_bytes / pc1.dram),
             "GPU": (flops / pc1.profile.gpu_flops_per_s.value, n_bytes / pc1.gpu)}  # fmt: skip
    return AuditRow(
        item="11", subject="the hardware box",
        says=f"{box['gpu_low']:g}-{box['gpu_high']:g} GB/s for RTX 3080 / 4070 / 4080; "
        f"{box['alu_low']:g}-{box['alu_high']:g}x in vector ALU",
        own="its first machine is an RTX 4070",
        roofline=(
            " / ".join(f"{rate:g}" for rate in real.values()) + " GB/s by datasheet. Decode is "
            "bound "
            "by bytes, not flops: a 13B neuron takes "
            + ", ".join(f"{by * 1e6:.3f} us of bytes and {fl * 1e6:.3f} us of flops on the {name}"
                        for name, (fl, by) in bound.items())
        ),
        verdict="contradicts its source",
        numbers={**real, "cpu_bytes_over_flops": bound["CPU"][1] / bound["CPU"][0],
                 "gpu_bytes_over_flops": bound["GPU"][1] / bound["GPU"][0]},
    )  # fmt: skip


def rows(b: Basis, seven: Machine, opt: Machine) -> list[AuditRow]:
    """Items 1 to 11."""
    return [
        ratio_row(b), other_ratios_row(b), serial_row(b), residual_row(b), burst_row(b),
        constants_row(b), size_row(b, seven, opt), slots_row(b, seven), prefetch_row(b),
        vram_row(b), hardware_row(b),
    ]  # fmt: skip
