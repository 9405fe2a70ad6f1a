"""kairox score: nats per token of given text, and a hash of the logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairox_sim.commands.live_options import (
    CacheDir,
    Dtype,
    HostNice,
    HostThreads,
    Numerics,
    PredictorFile,
    Promotion,
    Thresholds,
    Vram,
    Weights,
    host_side,
    loading_bar,
)
from kairox_sim.commands.options import (
    Controller,
    Gating,
    Json,
    Link,
    Policy,
    Prior,
    SetKeys,
    SettingsFile,
    Slots,
    exec_extra,
    print_json,
    print_warnings,
    progress,
    settings_from,
)
from kairox_sim.commands.record import Device, Emulate, Model, Threads, TimeScale
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from kairox_exec.score import Score


def score(
    model: Model,
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="More text files after the first."),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files whose own tokens are fed.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of each text.")] = 256,
    skip: Annotated[int, typer.Option(help="Tokens of each text to leave out first.")] = 0,
    prefill: Annotated[
        int, typer.Option(help="First tokens of a window, fed at once and not scored.")
    ] = 1,
    window: Annotated[
        int, typer.Option(help="Tokens of a sequence; each starts with an empty KV cache.")
    ] = 256,
    dense: Annotated[
        bool,
        typer.Option(
            "--dense", help="Score transformers' own dense model instead, and no settings."
        ),
    ] = False,
    against_dense: Annotated[
        bool,
        typer.Option(
            "--against-dense", help="Also say how far the logits are from the dense ones."
        ),
    ] = False,
    settings: SettingsFile = None,
    policy: Policy = None,
    controller: Controller = None,
    slots: Slots = None,
    gating: Gating = None,
    prior: Prior = None,
    numerics: Numerics = None,
    weights: Weights = None,
    dtype: Dtype = None,
    vram: Vram = None,
    predictor_file: PredictorFile = None,
    thresholds: Thresholds = None,
    set_keys: SetKeys = None,
    device: Device = "auto",
    emulate: Emulate = None,
    link: Link = None,
    time_scale: TimeScale = None,
    threads: Threads = None,
    host_threads: HostThreads = 1,
    host_nice: HostNice = 0,
    promotion: Promotion = "auto",
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Score given text: nats per token, and a hash of the logits under any settings.

    Two runs with one hash gave the same logits, bit for bit: with numerics deterministic, placement
    (budget, policy, timing) changes nothing; --threads, --prefill and --window do. Under gating
    predicted a chunk of a prefill computes what is predicted for any of its tokens: the loss
    depends on --prefill and on prefill_chunk.

    Example: kairox score --model experiments/models/tiny-reglu
    --text experiments/prompts/prose.txt --slots 100 --policy lru --numerics deterministic
    """
    with exec_extra():
        from kairox_exec.live import set_threads
        from kairox_exec.score import score as run
        from kairox_exec.score import score_dense

    files = [*(text or ()), *(more or ())]
    if not files:
        raise KairoxError("no text to score; name one or more files with --text")
    given: dict[str, Any] = {
        "policy": policy, "controller": controller, "slots": slots, "gating": gating,
        "prior": prior, "numerics": numerics, "weights": weights, "vram": vram,
        "predictor_file": predictor_file, "thresholds": thresholds, "set_keys": set_keys,
    }  # fmt: skip
    if dense:
        machine = {
            "device": device != "auto", "emulate": emulate, "link": link,
            "time_scale": time_scale, "host_threads": host_threads != 1, "host_nice": host_nice,
            "promotion": promotion != "auto", "cache_dir": cache_dir, "settings": settings,
            "against_dense": against_dense,
        }  # fmt: skip
        _refuse_beside_dense(given | machine)
    chosen = settings_from(settings, dtype=dtype, **given)
    set_threads(threads)
    cut: dict[str, Any] = {
        "tokens": tokens, "skip": skip, "prefill": prefill, "window": window,
    }  # fmt: skip
    with progress() as bar:
        task = bar.add_task("scoring", total=None)

        def show(done: int, of: int) -> None:
            bar.update(task, description="scoring", completed=done, total=of)

        if dense:
            result = score_dense(model, files, **cut, settings=chosen, progress=show)
        else:
            result = run(
                model,
                files,
                chosen,
                **cut,
                against_dense=against_dense,
                device=device,
                emulate=emulate,
                link=link,
                time_scale=time_scale,
                host=host_side(
                    host_threads, host_nice, promotion, cache_dir, loading_bar(bar, task)
                ),
                progress=show,
            )
    if as_json:
        print_json({**dataclasses.asdict(result), "perplexity": result.perplexity})
    else:
        print_score(result)
    print_warnings(result.warnings)


def _refuse_beside_dense(given: dict[str, Any]) -> None:
    names = {"set_keys": "--set"}
    needless = [
        names.get(name, f"--{name.replace('_', '-')}") for name, value in given.items() if value
    ]
    if needless:
        raise KairoxError(
            f"--dense scores the plain model on the CPU, of which {', '.join(needless)} say "
            "nothing; leave them out (--dtype and --threads are of both)"
        )


def print_score(result: Score) -> None:
    """Three lines; more where it was compared."""
    rounded = "" if result.weights == result.dtype else f", rounded from {result.dtype}"
    typer.echo(
        f"{result.setting}; gating {result.gating}, numerics {result.numerics}, FFN rows "
        f"{result.weights}{rounded}; neurons: {result.exactness}"
    )
    typer.echo(
        f"{result.nats_per_token:.6f} nats per token over {result.tokens} tokens (perplexity "
        f"{result.perplexity:.4f}), {result.tok_s:.1f} tok/s ({result.time}: {result.hardware})"
    )
    typer.echo(f"logits sha256 {result.logits_sha256}")
    if (d := result.difference) is None:
        return
    at = d.first_divergence
    first = "everywhere" if at is None else f"first another at position {at}"
    typer.echo(
        f"against the dense model in {result.dtype} ({d.dense_nats_per_token:.6f} nats): "
        f"largest logit error {d.max_logit_error:.3g}, rms {d.rms_logit_error:.3g} (logits' own "
        f"std {d.logit_std:.3g}), KL {d.kl_nats:.3g} nats, same most likely token "
        f"{d.top1_agreement:.2%} ({first})"
    )
