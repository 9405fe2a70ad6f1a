"""What recording costs: tokens per second with the recorder and without, of the same run.

    python benchmarks/bench_recorder.py [--json]

The shipped model reads one text, one token per step, all neurons resident, unpaced; runs with and
without recording alternate. Process CPU time of the steps and of what the recorder does between
them, single-thread, median of 5. The goal is at most 10 % of tokens per second, with the same
tokens and logits. The second row is a plain transformers run with hooks, whose rows a thread
writes: of the thread that computes, so without the writing, which has a core of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from kairox_exec.live import device_for, start
from kairox_exec.loading import load_dense
from kairox_exec.plain_recording import record_plain
from kairox_exec.recorder import Recorder
from kairox_exec.recording import record
from kairox_exec.text import encode_file, load_tokenizer
from kairox_sim.settings import Settings
from kairox_sim.trace import read_trace

MODEL = Path("experiments/models/tiny-reglu")
TEXT = Path("experiments/prompts/prose.txt")
TOKENS, PREFILL, REPEATS = 512, 32, 5
GOAL = 0.10


def run(recorder: Recorder | None) -> tuple[float, str]:
    """(CPU seconds per decode token, sha256 of the tokens chosen and their logits)."""
    ids = encode_file(TEXT, load_tokenizer(MODEL)).token_ids[:TOKENS]
    digest = hashlib.sha256()
    with device_for(Settings(policy="all"), MODEL, "cpu") as device:
        runner = start(MODEL, Settings(policy="all"), device)
        if recorder is not None:
            runner.pipeline.on_layer = recorder
        with runner:
            seconds = 0.0
            steps = runner.run([ids], prefill=PREFILL)
            while True:
                began_s = time.process_time()
                step = next(steps, None)
                if step is None:
                    break
                if recorder is not None:
                    recorder.end_step(step[1])
                took_s = time.process_time() - began_s
                if step[1].phase == "decode":
                    seconds += took_s
                digest.update(runner.logits.numpy().tobytes())
                digest.update(bytes([int(runner.logits.argmax()) % 256]))
    return seconds / (TOKENS - PREFILL), digest.hexdigest()


def run_plain(model: Any, config: Any, out: Path | None) -> tuple[float, str]:
    """As `run`, of the model as transformers runs it; CPU seconds of this thread."""
    tokenizer = load_tokenizer(MODEL)
    ids = torch.from_numpy(encode_file(TEXT, tokenizer).token_ids[:TOKENS].astype("int64"))[None]
    recording: AbstractContextManager[Any] = nullcontext()
    if out is not None:
        recording = record_plain(model, tokenizer, out, model_dir=MODEL)
    kv = DynamicCache(config=config)
    digest = hashlib.sha256()
    with torch.inference_mode(), recording:
        model(input_ids=ids[:, :PREFILL], cache=kv)
        seconds = 0.0
        for at in range(PREFILL, TOKENS):
            began_s = time.thread_time()
            logits = model(input_ids=ids[:, at : at + 1], cache=kv).logits
            seconds += time.thread_time() - began_s
            digest.update(logits.numpy().tobytes())
    return seconds / (TOKENS - PREFILL), digest.hexdigest()


def plain() -> dict[str, Any]:
    model, config = load_dense(MODEL)
    without, recorded, hashes = [], [], set()
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS):
            seconds, digest = run_plain(model, config, None)
            without.append(seconds)
            hashes.add(digest)
            seconds, digest = run_plain(model, config, Path(folder) / f"{repeat}.arrow")
            recorded.append(seconds)
            hashes.add(digest)
    return summary(without, recorded, hashes)


def summary(without: list[float], recorded: list[float], hashes: set[str]) -> dict[str, Any]:
    return {
        "tok_s_without": 1 / median(without),
        "tok_s_recorded": 1 / median(recorded),
        "overhead": median(recorded) / median(without) - 1,
        "goal": GOAL,
        "same_logits": len(hashes) == 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = record(MODEL, TEXT, Path(folder) / "model.arrow", tokens=40, settings=Settings(
            policy="all", predictor="none"))  # fmt: skip
        header = read_trace(made).header
        without, recorded, hashes = [], [], set()
        for repeat in range(REPEATS):
            seconds, digest = run(None)
            without.append(seconds)
            hashes.add(digest)
            with Recorder(Path(folder) / f"{repeat}.arrow", header) as recorder:
                seconds, digest = run(recorder)
            recorded.append(seconds)
            hashes.add(digest)
    results = {"hybrid": summary(without, recorded, hashes), "plain": plain()}
    if as_json:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        for name, result in results.items():
            sys.stdout.write(
                f"recording, {name}: {result['overhead']:+.1%} CPU time per token (goal at most "
                f"{GOAL:.0%}): {result['tok_s_recorded']:.1f} tok/s with, "
                f"{result['tok_s_without']:.1f} without; logits "
                f"{'unchanged' if result['same_logits'] else 'CHANGED'}; median of {REPEATS}\n"
            )
    if not all(result["same_logits"] for result in results.values()):
        sys.exit("recording changed the logits")


if __name__ == "__main__":
    main()
