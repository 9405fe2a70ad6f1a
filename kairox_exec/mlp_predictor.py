"""The adjacent-layer predictor: two matrices a layer, from a state of the layer before.

d_model -> rank -> n_neurons, as Deja Vu (arXiv:2310.17157) and PowerInfer (arXiv:2312.12456) train
them: a state, divided by its root mean square, a linear layer, ReLU, a linear layer; a neuron is
predicted where its output exceeds the layer's threshold, which training chose for a recall. Layer 0
has no layer before it and is predicted from its own state after attention.

One safetensors file: `layers.N.down`, `.down_bias`, `.up`, `.up_bias` in float16, and what it was
trained on in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kairox_sim.errors import KairoxError

FORMAT = 1
_KEY = "kairox.predictor"


@dataclass(frozen=True, slots=True)
class PredictorInfo:
    """What a predictor is for and what it has seen."""

    model: str
    model_sha256: str
    trigger: str  # when it is asked: attn_out or attn_in
    rank: int
    recall_target: float | tuple[float, ...]  # of every layer, or of each
    thresholds: tuple[float, ...]  # per layer, of the output before any sigmoid
    # (text's sha256, first token, token after the last) of every sequence that it was trained on
    seen: tuple[tuple[str, int, int], ...]

    def target_of(self, layer: int) -> float:
        """The recall that the layer's threshold was chosen for."""
        target = self.recall_target
        return target[layer] if isinstance(target, tuple) else target


@dataclass(frozen=True, slots=True)
class LayerNet:
    """Float32. Shapes: [rank, d_model], [rank], [n_neurons, rank], [n_neurons]."""

    down: torch.Tensor
    down_bias: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, d_model], any float dtype -> float32 [n, n_neurons]; probability's logit."""
        x = normalised(hidden)
        x = functional.relu(functional.linear(x, self.down, self.down_bias))
        return functional.linear(x, self.up, self.up_bias)


@dataclass(frozen=True, slots=True)
class MlpPredictor:
    """A net per layer. Called by the live path, which knows no more of it than `predict`."""

    info: PredictorInfo
    nets: tuple[LayerNet, ...]

    @property
    def trigger(self) -> str:
        return self.info.trigger

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def model_sha256(self) -> str:
        return self.info.model_sha256

    @property
    def n_bytes(self) -> int:
        """Of a layer, in float16."""
        net = self.nets[0]
        return 2 * sum(t.numel() for t in (net.down, net.down_bias, net.up, net.up_bias))

    @torch.inference_mode()
    def predict(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., d_model], of the layer before `layer` -> bool [n_tokens, n_neurons]."""
        outputs = self.nets[layer].outputs(hidden.reshape(-1, hidden.shape[-1]))
        return outputs > self.info.thresholds[layer]

    def shifted(self, by: float) -> MlpPredictor:
        """The same with every threshold raised by `by`: fewer predicted, less recall."""
        moved = tuple(threshold + by for threshold in self.info.thresholds)
        return replace(self, info=replace(self.info, thresholds=moved))

    def to(self, device: torch.device | str) -> MlpPredictor:
        """On a device."""
        nets = tuple(
            LayerNet(*(t.to(device) for t in (net.down, net.down_bias, net.up, net.up_bias)))
            for net in self.nets
        )
        return replace(self, nets=nets)

    def save(self, path: str | Path) -> Path:
        """Write the file; `load_predictor` gives it back, its weights rounded to float16."""
        from safetensors.torch import save_file

        tensors = {
            f"layers.{i}.{field.name}": getattr(net, field.name).to("cpu", torch.float16)
            for i, net in enumerate(self.nets)
            for field in fields(LayerNet)
        }
        about = json.dumps({"format": FORMAT, **asdict(self.info)})
        target = Path(path)
        beside = target.with_name(target.name + ".writing")
        try:
            beside.touch()
            mode = beside.stat().st_mode  # safetensors' own files are for their owner alone
            save_file(
                {k: t.contiguous() for k, t in tensors.items()}, beside, metadata={_KEY: about}
            )
            beside.chmod(mode)
            beside.replace(target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        return target


def normalised(hidden: torch.Tensor) -> torch.Tensor:
    """Each state over its root mean square, float32: residual streams grow from layer to layer."""
    x = hidden.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


def load_predictor(
    path: str | Path,
    *,
    model_sha256: str | None = None,
    n_layers: int | None = None,
    n_neurons: int | None = None,
) -> MlpPredictor:
    """A file of `kairox train-predictor`. KairoxError where damaged, or of another model."""
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if not file.is_file():
        raise KairoxError(f"no predictor {str(file)!r}; `kairox train-predictor` makes one")
    try:
        with safe_open(file, framework="pt") as opened:
            info = _info(opened.metadata(), file)
            nets = tuple(_net(opened, i) for i in range(len(info.thresholds)))
    except (SafetensorError, OSError) as error:
        raise KairoxError(f"cannot read the predictor {str(file)!r}: {error}") from error
    _require_finite(nets, file)
    for what, is_, wanted in (
        ("weights", info.model_sha256, model_sha256),
        ("layers", len(nets), n_layers),
        ("neurons a layer", nets[0].up.shape[0], n_neurons),
    ):
        if wanted is not None and is_ != wanted:
            shown = [f"{str(value)[:12]}" for value in (is_, wanted)]
            raise KairoxError(
                f"the predictor {str(file)!r} was trained for {info.model!r} with {what} "
                f"{shown[0]} and the model has {shown[1]}; train one for this model"
            )
    return MlpPredictor(info, nets)


def _info(metadata: dict[str, str] | None, file: Path) -> PredictorInfo:
    text = (metadata or {}).get(_KEY)
    if text is None:
        raise KairoxError(
            f"{str(file)!r} is no predictor: `kairox train-predictor` writes them, with what they "
            "were trained on"
        )
    try:
        content = json.loads(text)
        version = content.pop("format")
        if version == FORMAT:
            seen = tuple((str(s), int(a), int(b)) for s, a, b in content.pop("seen"))
            thresholds, target = tuple(content.pop("thresholds")), content.pop("recall_target")
            target = tuple(target) if isinstance(target, list) else float(target)
            return PredictorInfo(**content, recall_target=target, thresholds=thresholds, seen=seen)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KairoxError(
            f"{str(file)!r}: what the predictor says of itself is damaged ({error!r}); train it "
            "again"
        ) from error
    raise KairoxError(f"{str(file)!r} is of another version of kairox; train it again")


def _net(opened: Any, layer: int) -> LayerNet:
    return LayerNet(
        *(opened.get_tensor(f"layers.{layer}.{field.name}").float() for field in fields(LayerNet))
    )


def _require_finite(nets: Sequence[LayerNet], file: Path) -> None:
    for i, net in enumerate(nets):
        for field in fields(LayerNet):
            if not bool(torch.isfinite(getattr(net, field.name)).all()):
                raise KairoxError(f"{str(file)!r}: layer {i}'s {field.name} is not finite")
