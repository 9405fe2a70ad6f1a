"""What each way of deciding and adding costs in nats per token, and what missing neurons cost.

    python -m experiments.lossless -o experiments/results

Five held-out domains through the shipped model: the dense model of transformers, exact and screened
gating, deterministic numerics, a predictor's sets alone, and FATReLU at several thresholds. Then
the trained predictor at several thresholds: recall against logit error, divergence and speed. The
Kairox Guide claims that perplexity is preserved to 100 %; the table says where that holds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional

from kairox_exec.layer_step import LayerStep
from kairox_exec.live import device_for, start
from kairox_exec.loading import load_dense
from kairox_exec.machine import machine_facts
from kairox_exec.mlp_predictor import load_predictor
from kairox_exec.score import Score, score, score_dense
from kairox_exec.text import encode_file, load_tokenizer
from kairox_sim.commands.options import progress
from kairox_sim.errors import KairoxError
from kairox_sim.metrics import plain
from kairox_sim.provenance import code_version
from kairox_sim.settings import Settings

MODEL = Path("experiments/models/tiny-reglu")
PREDICTOR = Path("experiments/models/tiny-reglu-predictor.safetensors")
DOMAINS = ("prose", "code", "math", "html", "json")
TOKENS = 512  # of each, from the start: the predictor learnt from tokens 4,096 to 6,143
CUT: dict[str, Any] = {"tokens": TOKENS, "window": 256, "prefill": 1}
SHIFTS = (-3.0, -1.5, 0.0, 1.5, 3.0, 5.0)  # of the predictor's thresholds
FATRELU = (0.01, 0.05, 0.1, 0.2, 0.4)
BASE = {"policy": "lru", "slots": 224}
TRAINED = {**BASE, "gating": "predicted", "predictor": "rank"}
WAYS: dict[str, dict[str, Any]] = {
    "exact, fast": BASE,
    "exact, deterministic": {**BASE, "numerics": "deterministic"},
    "screened, fast": {**BASE, "gating": "screened"},
    "screened, deterministic": {**BASE, "gating": "screened", "numerics": "deterministic"},
    "predicted by the next layer's own gate": {
        **BASE, "gating": "predicted", "predictor": "lookahead",
    },
    "predicted, trained, recall target 95 %": {**TRAINED, "predictor_file": str(PREDICTOR)},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lossy:
    """The trained predictor with its thresholds moved, over all domains."""

    shift: float
    recall: float
    precision: float
    evaluated_share: float
    max_logit_error: float
    rms_logit_error: float
    kl_nats: float
    top1_agreement: float
    first_divergence: float  # mean position, of the domains that diverge
    extra_nats: float
    tok_s: float


def text_of(domain: str) -> Path:
    return Path(f"experiments/prompts/{domain}.txt")


def fatrelu_nats(domain: str, threshold: float) -> float:
    """Nats per token of the dense model whose neurons fire above `threshold`."""
    model, _ = load_dense(MODEL, fatrelu_threshold=threshold)
    ids = torch.from_numpy(
        encode_file(text_of(domain), load_tokenizer(MODEL)).token_ids[:TOKENS].astype("int64")
    )
    nats = []
    with torch.inference_mode():
        for window in ids.split(CUT["window"]):
            logits = model(input_ids=window[None]).logits[0, :-1]
            nats += functional.cross_entropy(logits.double(), window[1:], reduction="none").tolist()
    return fmean(nats)


def recall_at(settings: Settings) -> tuple[float, float, float]:
    """(recall, precision, evaluated share) of a run that decides by prediction, audited."""
    counts = torch.zeros(4, dtype=torch.float64)

    def audit(step: LayerStep) -> None:
        assert step.true_active is not None
        both = (step.true_active & step.evaluated).sum()
        for at, n in enumerate((both, step.true_active.sum(), step.evaluated.sum())):
            counts[at] += int(n)
        counts[3] += step.evaluated.size

    tokenizer = load_tokenizer(MODEL)
    with device_for(settings, MODEL, "cpu") as device:
        runner = start(MODEL, settings, device, on_layer=audit, audit=True)
        with runner:
            for domain in DOMAINS:
                ids = encode_file(text_of(domain), tokenizer).token_ids[:128]
                for _ in runner.run([ids], prefill=1):
                    pass
    both, active, evaluated, every = counts.tolist()
    return both / active, both / evaluated, evaluated / every


def lossy_row(folder: Path, shift: float) -> Lossy:
    """The trained predictor, its thresholds moved by `shift`."""
    path = load_predictor(PREDICTOR).shifted(shift).save(folder / f"shifted-{shift:g}.safetensors")
    settings = Settings.of({**TRAINED, "predictor_file": str(path)})
    recall, precision, share = recall_at(settings)
    scores = [score(MODEL, text_of(d), settings, against_dense=True, **CUT) for d in DOMAINS]
    path.unlink()
    found = [s.difference for s in scores if s.difference is not None]
    first = [d.first_divergence for d in found if d.first_divergence is not None]
    return Lossy(
        shift=shift,
        recall=recall,
        precision=precision,
        evaluated_share=share,
        max_logit_error=max(d.max_logit_error for d in found),
        rms_logit_error=math.sqrt(fmean(d.rms_logit_error**2 for d in found)),
        kl_nats=fmean(d.kl_nats for d in found),
        top1_agreement=fmean(d.top1_agreement for d in found),
        first_divergence=fmean(first) if first else math.nan,
        extra_nats=fmean(s.nats_per_token - d.dense_nats_per_token
                         for s, d in zip(scores, found, strict=True)),
        tok_s=fmean(s.tok_s for s in scores),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path("out"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    nats: dict[str, dict[str, float]] = {}
    hashes: dict[str, dict[str, str]] = {}
    with progress() as bar:
        total = len(DOMAINS) * (1 + len(WAYS) + len(FATRELU)) + len(SHIFTS)
        task = bar.add_task("scoring", total=total)

        def row(name: str, of: Callable[[str], Score | float]) -> None:
            for domain in DOMAINS:
                found = of(domain)
                value = found.nats_per_token if isinstance(found, Score) else found
                nats.setdefault(name, {})[domain] = value
                if isinstance(found, Score):
                    hashes.setdefault(name, {})[domain] = found.logits_sha256
                bar.advance(task)

        row("dense, by transformers", lambda d: score_dense(MODEL, text_of(d), **CUT))
        for name, way in WAYS.items():
            settings = Settings.of(way)
            row(name, lambda d, s=settings: score(MODEL, text_of(d), s, **CUT))  # type: ignore[misc]
        for threshold in FATRELU:
            row(f"dense, FATReLU {threshold:g}", lambda d, t=threshold: fatrelu_nats(d, t))  # type: ignore[misc]
        lossy = []
        for shift in SHIFTS:
            lossy.append(lossy_row(out, shift))
            bar.advance(task)
    conditions = {"model": MODEL.name, **CUT, "machine": machine_facts(), **code_version()}
    content = {
        "nats_per_token": nats,
        "logits_sha256": hashes,
        "predictor": [asdict(one) for one in lossy],
        "conditions": conditions,
    }
    text = json.dumps(plain(content), indent=1, allow_nan=False)
    (out / "lossless.json").write_text(text + "\n")
    table = _page(nats, hashes, lossy)
    (out / "lossless.md").write_text(table)
    sys.stdout.write(table)


def _page(
    nats: dict[str, dict[str, float]], hashes: dict[str, dict[str, str]], lossy: list[Lossy]
) -> str:
    dense = nats["dense, by transformers"]
    lines = [
        "# Nats per token, and what missing neurons cost",
        "",
        f"`python -m experiments.lossless`: measured on the shipped model, {TOKENS} tokens of each",
        "domain that nothing was trained or fitted on; LRU, a quarter of the neurons resident.",
        "",
        "| | " + " | ".join(DOMAINS) + " | largest change |",
        "|---|" + "---:|" * (len(DOMAINS) + 1),
    ]
    for name, row in nats.items():
        change = max((row[d] - dense[d] for d in DOMAINS), key=abs)
        shown = "-" if name in ("dense, by transformers",) else f"{change:+.2g}"
        lines.append(
            f"| {name} | " + " | ".join(f"{row[d]:.5f}" for d in DOMAINS) + f" | {shown} |"
        )
    same = hashes["exact, deterministic"] == hashes["screened, deterministic"]
    lines += [
        "",
        f"Logits of exact and screened gating under deterministic numerics: "
        f"{'the same bits' if same else 'DIFFERENT BITS'}.",
        "",
        "## A predictor that decides alone",
        "",
        "Its thresholds moved; recall is of the active neurons, audited in the run itself. Errors",
        "are of logits, against the dense model; tok/s is this machine's, unpaced, at this size.",
        "",
        "| shift | recall | precision | evaluated | max error | rms error | KL, nats | same top-1 "
        "| first other at | extra nats | tok/s |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in lossy:
        first = "never" if one.first_divergence != one.first_divergence else (
            f"{one.first_divergence:.0f}")  # fmt: skip
        lines.append(
            f"| {one.shift:+g} | {one.recall:.2%} | {one.precision:.1%} "
            f"| {one.evaluated_share:.1%} | {one.max_logit_error:.3g} "
            f"| {one.rms_logit_error:.3g} | {one.kl_nats:.2g} "
            f"| {one.top1_agreement:.2%} | {first} | {one.extra_nats:+.4f} | {one.tok_s:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        main()
    except KairoxError as error:
        sys.exit(f"lossless: {error}")
