"""What recording costs: CPU time per decode token with the recorder and without.

    python benchmarks/bench_recorder.py [--json]

The shipped model reads one text, one token per step, single-thread. Recorded steps and others take
turns, so that what else runs on the machine slows down both. "hybrid": all neurons resident,
unpaced; CPU time of the process. "plain": two transformers models with the same weights, one with
hooks; CPU time of the thread that computes, and that of the thread that writes, shared out evenly
over the recorded steps. Differences are those of groups of steps in which a batch is written once;
the median over groups is given, and the middle half of them. The goal is at most 10 % of tokens
per second, with the same logits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from transformers import DynamicCache

from kairox_exec.live import device_for, start
from kairox_exec.loading import load_dense
from kairox_exec.plain_recording import AT_ONCE, record_plain
from kairox_exec.recorder import Recorder
from kairox_exec.recording import record
from kairox_exec.text import encode_file, load_tokenizer
from kairox_sim.settings import Settings
from kairox_sim.trace import read_trace

MODEL = Path("experiments/models/tiny-reglu")
TEXT = Path("experiments/prompts/prose.txt")
PREFILL, REPEATS = 32, 5
TOKENS = PREFILL + 16 * AT_ONCE
BATCH = 8  # steps that the hybrid run's recorder writes at once
GOAL = 0.10


@dataclass(frozen=True, slots=True)
class Pair:
    """CPU seconds of a step that was recorded and of its neighbour that was not."""

    recorded: float
    without: float


def hybrid(recorder: Recorder | None) -> tuple[list[Pair], str]:
    """(pairs of decode steps, sha256 of all logits); None: nothing is recorded."""
    ids = encode_file(TEXT, load_tokenizer(MODEL)).token_ids[:TOKENS]
    digest, seconds = hashlib.sha256(), []
    with device_for(Settings(policy="all"), MODEL, "cpu") as device:
        runner = start(MODEL, Settings(policy="all"), device)
        with runner:
            steps = runner.run([ids], prefill=PREFILL)
            for number in range(1 + TOKENS - PREFILL):  # the prompt first
                now = recorder if number % 2 == 0 else None
                runner.pipeline.on_layer = now
                began_s = time.process_time()
                step = next(steps)
                if now is not None:
                    now.end_step(step[1])
                seconds.append(time.process_time() - began_s)
                digest.update(runner.logits.numpy().tobytes())
    decode = seconds[1:]  # without, recorded, without ...
    pairs = [Pair(decode[i + 1], decode[i]) for i in range(0, len(decode), 2)]
    return pairs, digest.hexdigest()


def plain(model: Any, hooked: Any, config: Any, out: Path) -> tuple[list[Pair], bool]:
    """(pairs of decode steps, whether all logits were the same)."""
    tokenizer = load_tokenizer(MODEL)
    ids = torch.from_numpy(encode_file(TEXT, tokenizer).token_ids[:TOKENS].astype("int64"))[None]
    pairs, same = [], True
    caches = {id(m): DynamicCache(config=config) for m in (model, hooked)}

    def step(which: Any, part: torch.Tensor) -> tuple[float, torch.Tensor]:
        began_s = time.thread_time()
        logits = which(input_ids=part, cache=caches[id(which)]).logits
        return time.thread_time() - began_s, logits

    with torch.inference_mode(), record_plain(hooked, tokenizer, out, model_dir=MODEL):
        for which in (model, hooked):
            step(which, ids[:, :PREFILL])
        began_s, thread_s = time.process_time(), time.thread_time()
        for at in range(PREFILL, TOKENS):
            order = (model, hooked) if at % 2 else (hooked, model)
            took = {id(which): step(which, ids[:, at : at + 1]) for which in order}
            pairs.append(Pair(took[id(hooked)][0], took[id(model)][0]))
            same &= torch.equal(took[id(hooked)][1], took[id(model)][1])
        thread_s = time.thread_time() - thread_s
        time.sleep(0.2)  # until the last batch is written; leaving the recording does more
        process_s = time.process_time() - began_s
    writing_s = (process_s - thread_s) / len(pairs)
    return [Pair(pair.recorded + writing_s, pair.without) for pair in pairs], same


def summary(pairs: list[Pair], group: int, same_logits: bool) -> dict[str, Any]:
    shares = []
    for at in range(0, len(pairs) - group + 1, group):
        some = pairs[at : at + group]
        shares.append(sum(p.recorded for p in some) / sum(p.without for p in some) - 1)
    low, _, high = quantiles(shares, n=4)
    overhead, without_s = median(shares), median(pair.without for pair in pairs)
    return {
        "tok_s_without": 1 / without_s,
        "tok_s_recorded": 1 / (without_s * (1 + overhead)),
        "overhead": overhead,
        "middle_half": [low, high],
        "goal": GOAL,
        "same_logits": same_logits,
    }


def measure() -> dict[str, dict[str, Any]]:
    model, config = load_dense(MODEL)
    hooked, _ = load_dense(MODEL)
    hooked.load_state_dict(model.state_dict(), assign=True)  # one set of weights to read
    in_hybrid: list[Pair] = []
    in_plain: list[Pair] = []
    same = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = record(MODEL, TEXT, folder / "model.arrow", tokens=40, settings=Settings(
            policy="all", predictor="none"))  # fmt: skip
        header = read_trace(made).header
        digests = {hybrid(None)[1]}
        for repeat in range(REPEATS):
            with Recorder(folder / f"h{repeat}.arrow", header, steps_per_batch=BATCH) as recorder:
                pairs, digest = hybrid(recorder)
            in_hybrid += pairs
            digests.add(digest)
            pairs, equal = plain(model, hooked, config, folder / f"p{repeat}.arrow")
            in_plain += pairs
            same &= equal
    return {
        "hybrid": summary(in_hybrid, BATCH, len(digests) == 1),
        "plain": summary(in_plain, AT_ONCE, same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    results = measure()
    if as_json:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        for name, result in results.items():
            low, high = result["middle_half"]
            sys.stdout.write(
                f"recording, {name}: {result['overhead']:+.1%} CPU time per token (goal at most "
                f"{GOAL:.0%}; middle half {low:+.1%} to {high:+.1%}): "
                f"{result['tok_s_recorded']:.1f} tok/s with, {result['tok_s_without']:.1f} "
                f"without; logits {'unchanged' if result['same_logits'] else 'CHANGED'}\n"
            )
    if not all(result["same_logits"] for result in results.values()):
        sys.exit("recording changed the logits")


if __name__ == "__main__":
    main()
