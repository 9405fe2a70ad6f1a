"""What the audit of the guide is computed from: shapes, machines, shares, and rooflines on them.

A roofline here is bytes over the profile's rates, without any fixed cost: no run is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from experiments.published.data import number, table
from experiments.published.machines import margined
from kairox_sim.hardware import HardwareProfile, load_profile
from kairox_sim.memory import fits, max_layers, max_slots
from kairox_sim.model import ModelShape, find_shape

CONTEXT = 1024  # tokens, as in the paper; keys and values of half of them are read on average

Verdict = Literal[
    "follows",
    "contradicts itself",
    "contradicts its source",
    "impossible by byte conservation",
    "depends on the share evaluated",
    "plausible",
    "not checkable",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One statement of the guide, and what is left of it. `numbers` are what the texts quote."""

    item: str
    subject: str
    says: str
    own: str  # what follows from its own constants and tables
    roofline: str
    verdict: Verdict
    numbers: dict[str, float]


@dataclass(frozen=True)
class Machine:
    """One model on one machine, bytes per token and seconds; `share`: part of neurons evaluated."""

    profile: HardwareProfile
    shape: ModelShape

    @property
    def gpu(self) -> float:
        """Bytes/s of a pass over weights in device memory."""
        return self.profile.ffn_gpu.bytes_per_s.value

    @property
    def dram(self) -> float:
        """Bytes/s, effective, shared by CPU work and copies."""
        return self.profile.dram_bytes_per_s.value

    @property
    def link(self) -> float:
        """Bytes/s of large copies to the device."""
        return self.profile.h2d.bytes_per_s.value

    @cached_property
    def slots(self) -> int:
        """Neurons a layer that fit beside attention, head, predictor, keys, values and margin."""
        return max_slots(self.profile, self.shape, "predicted", CONTEXT)

    @property
    def cached_bytes(self) -> float:
        """All slots of all layers."""
        return float(self.shape.n_layers * self.slots * self.shape.neuron_bytes)

    def ffn_bytes(self, share: float) -> float:
        """Neurons of one token, all layers."""
        return self.shape.n_layers * share * self.shape.n_neurons * self.shape.neuron_bytes

    def active(self, share: float) -> float:
        """Neurons of one token in one layer."""
        return share * self.shape.n_neurons

    @property
    def kv_bytes(self) -> float:
        """Keys and values read per token, in the mean over the context."""
        return self.shape.n_layers * self.shape.kv_bytes_per_token * CONTEXT / 2

    @property
    def dense_bytes(self) -> float:
        """What every token reads on the device: attention, predictor, head, keys and values."""
        shape = self.shape
        per_layer = shape.attention_bytes + shape.predictor_bytes
        return shape.n_layers * per_layer + shape.head_bytes + self.kv_bytes

    @property
    def floor_s(self) -> float:
        """The device's part that no caching touches."""
        return self.dense_bytes / self.gpu

    def any_policy_s(self, share: float) -> float:
        """Every cached byte used every token, all host traffic hidden behind the device's work."""
        hit = min(self.cached_bytes, self.ffn_bytes(share))
        return max(self.floor_s + hit / self.gpu, (self.ffn_bytes(share) - hit) / self.dram)

    def static_s(self, share: float) -> float:
        """As `any_policy_s`, but the host works only beside the FFN, as without moves it must."""
        hit = min(self.cached_bytes, self.ffn_bytes(share))
        return self.floor_s + max(hit / self.gpu, (self.ffn_bytes(share) - hit) / self.dram)

    def eager_s(self, share: float, link_bytes_per_s: float | None = None) -> float:
        """Everything missing is copied before it is computed on the device."""
        hit = min(self.cached_bytes, self.ffn_bytes(share))
        rate = link_bytes_per_s or self.link
        return self.floor_s + hit / self.gpu + (self.ffn_bytes(share) - hit) / rate

    @cached_property
    def whole_layers(self) -> int:
        """Layers of a dense run that fit on the device."""
        return max_layers(self.profile, self.shape, CONTEXT)

    @property
    def layer_bytes(self) -> float:
        """One dense layer with the keys and values it reads."""
        shape = self.shape
        ffn = shape.n_neurons * shape.neuron_bytes
        return shape.attention_bytes + ffn + self.kv_bytes / shape.n_layers

    @property
    def llama_host_bytes(self) -> float:
        """What llama.cpp reads from host memory per token: the layers that do not fit, the head."""
        left = self.shape.n_layers - self.whole_layers
        return left * self.layer_bytes + (self.shape.head_bytes if left else 0)

    @property
    def llama_device_s(self) -> float:
        """Its layers on the device."""
        head = 0 if self.llama_host_bytes else self.shape.head_bytes
        return (self.whole_layers * self.layer_bytes + head) / self.gpu

    @property
    def llama_s(self) -> float:
        """One part after the other."""
        return self.llama_device_s + self.llama_host_bytes / self.dram


@dataclass(frozen=True)
class Basis:
    """The models and machines that the guide names, and the shares that were measured."""

    @cached_property
    def pc1(self) -> Machine:
        """RTX 4070 and i7-13700K, with the guide's 13B model in FP16 and the fitted margin."""
        return Machine(margined("pc1"), find_shape("prosparse-13b"))

    @cached_property
    def pc2(self) -> Machine:
        """RTX 3060 and Ryzen 7 5700X on PCIe 3.0, same model."""
        return Machine(margined("pc2"), find_shape("prosparse-13b"))

    @cached_property
    def pc1_unfitted(self) -> Machine:
        """The first machine with the margin of its profile: what a verdict owes to the margin."""
        return Machine(load_profile("pc1"), self.pc1.shape)

    @cached_property
    def true_share(self) -> float:
        """Neurons of ProSparse-13B that fire."""
        return number("prosparse", "active", "prosparse-13b") / 100

    @cached_property
    def guide_share(self) -> float:
        """The middle of the guide's 10 to 20 %."""
        return number("guide", "active", "middle") / 100

    @cached_property
    def predicted_share(self) -> float:
        """What a predictor fires: measured on ProSparse-7B by the fork, assumed for 13B."""
        low: float = table("fork", "setting")["predicted_active_percent"][0]
        return low / 100

    def plan_of_slots(self, slots: int) -> str:
        """The memory arithmetic of so many slots a layer on the guide's first machine."""
        return fits(self.pc1.profile, self.pc1.shape, "predicted", slots, CONTEXT).explain()

    @cached_property
    def quarter_bytes(self) -> float:
        """A neuron in Q4_0: 18 bytes per 32 weights."""
        return self.pc1.shape.rows_per_neuron * self.pc1.shape.d_model * 18 / 32


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB"


def tok(seconds: float) -> str:
    return f"{1 / seconds:.1f} tokens/s"
