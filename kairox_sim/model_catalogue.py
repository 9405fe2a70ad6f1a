"""The rows of the model catalogue: facts, each with its source. `model.CATALOGUE` checks them.

A row is the arguments of a ModelShape. Shapes are of the named Hugging Face config.json, weights as
run in a 2-byte type. Predictor ranks: those of the Kairox artifact where logs of it are published
(github.com/brothergiven/kairox.cpp, abl_logs: `predictor.low_ranks` and buffer sizes), else derived
from the parameters of PowerInfer's predictors (arXiv 2312.12456), as the rank, equal in all
layers, that has as many: parameters / (n_layers x (d_model + n_neurons)). The two differ by more
than their models do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FORK = "github.com/brothergiven/kairox.cpp"
_POWERINFER = "PowerInfer, arXiv 2312.12456"
_PROSPARSE = "ProSparse, arXiv 2402.13516"
_TURBO = "TurboSparse, arXiv 2406.05955"
_NO_PREDICTOR = "no published predictor"

_FP16: Mapping[str, Any] = {
    "bytes_per_weight": 2, "activation_threshold": 0.0, "predictor_rank": None,
    "active_share": None, "predicted_share": None,
    "share_source": "no published share of active neurons",
}  # fmt: skip
_OPT = {
    **_FP16, "gated": False, "activation": "relu", "tied_embedding": True, "vocab": 50272,
    "share_source": f"2-4 % of neurons active in OPT 6.7B to 66B ({_POWERINFER}; LLM in a Flash, "
    "arXiv 2312.11514); 0.03 chosen within",
}  # fmt: skip
_GATED = {**_FP16, "gated": True, "tied_embedding": False, "vocab": 32000, "head_dim": 128}
_7B = {"n_layers": 32, "d_model": 4096, "n_neurons": 11008, "n_heads": 32, "n_kv_heads": 32}
_13B = {"n_layers": 40, "d_model": 5120, "n_neurons": 13824, "n_heads": 40, "n_kv_heads": 40}
_70B = {"n_layers": 80, "d_model": 8192, "n_neurons": 28672, "n_heads": 64, "n_kv_heads": 8}
_MISTRAL = {"n_layers": 32, "d_model": 4096, "n_neurons": 14336, "n_heads": 32, "n_kv_heads": 8}
_MIXTRAL = {**_MISTRAL, "n_neurons": 8 * 14336, "n_experts": 8, "experts_per_token": 2}
_FATRELU = {"activation": "fatrelu", "activation_threshold": 0.01}
_SWIGLU = {
    "activation": "silu", "relu_sparse": False,
    "share_source": "SiLU is never exactly 0: no neuron is silent",
}  # fmt: skip
_NEMOTRON = {
    **_FP16, "gated": False, "activation": "relu2", "tied_embedding": False, "vocab": 256000,
    "n_kv_heads": 8, "share_source": "no published share of active neurons for squared ReLU",
}  # fmt: skip


def _opt(name: str, layers: int, d_model: int, heads: int, source: str, **more: Any) -> Any:
    return {
        **_OPT, "name": name, "n_layers": layers, "d_model": d_model, "n_neurons": 4 * d_model,
        "n_heads": heads, "n_kv_heads": heads, "head_dim": d_model // heads,
        "source": f"Hugging Face facebook/{name}, config.json; {source}", **more,
    }  # fmt: skip


ROWS: tuple[Mapping[str, Any], ...] = (
    {
        **_FP16, "name": "tiny-reglu", "n_layers": 6, "d_model": 192, "n_neurons": 896,
        "n_heads": 6, "n_kv_heads": 2, "head_dim": 32, "vocab": 1024, "gated": True,
        "activation": "relu", "bytes_per_weight": 4, "tied_embedding": True,
        "share_source": "none published: it is in the traces recorded from it",
        "source": "experiments/models/tiny-reglu/config.json; the file is float16, run in float32",
    },
    {
        **_GATED, **_7B, **_FATRELU, "name": "prosparse-7b", "predictor_rank": 1024,
        "active_share": 0.1068, "predicted_share": 0.235,
        "share_source": f"{_PROSPARSE}: 89.32 % sparse; the Kairox artifact's predictor fires "
        f"22.2-24.6 % ({_FORK})",
        "source": f"Hugging Face SparseLLM/prosparse-llama-2-7b, config.json; {_PROSPARSE}; run in "
        f"a 2-byte type; predictor rank chosen within the 768-1152 of the published ones ({_FORK})",
    },
    {
        **_GATED, **_13B, **_FATRELU, "name": "prosparse-13b", "predictor_rank": 1024,
        "active_share": 0.1120, "predicted_share": 0.235,
        "share_source": f"{_PROSPARSE}: 88.80 % sparse; predicted share assumed: that of "
        f"prosparse-7b ({_FORK}), none is published for 13B",
        "source": f"Hugging Face SparseLLM/prosparse-llama-2-13b, config.json; {_PROSPARSE}; "
        "predictor rank assumed: that of prosparse-7b, 6 % of the parameters, of the 6-7 % "
        f"that {_POWERINFER} reports",
    },
    {
        **_GATED, **_7B, "name": "relu-llama-7b", "activation": "relu", "active_share": 0.3302,
        "share_source": f"{_PROSPARSE}: ReluLLaMA-7B 66.98 % sparse",
        "source": f"Hugging Face SparseLLM/ReluLLaMA-7B, config.json; {_NO_PREDICTOR} size",
    },
    {
        **_GATED, **_13B, "name": "relu-llama-13b", "activation": "relu", "active_share": 0.2844,
        "share_source": f"{_PROSPARSE}: ReluLLaMA-13B 71.56 % sparse",
        "source": f"Hugging Face SparseLLM/ReluLLaMA-13B, config.json; {_NO_PREDICTOR} size",
    },
    {
        **_GATED, **_70B, "name": "relu-llama-70b", "activation": "relu", "predictor_rank": 1919,
        "active_share": 0.18,
        "share_source": f"{_POWERINFER}, Table 3: LLaMA2-ReGLU-70B 82 % sparse",
        "source": "Hugging Face SparseLLM/ReluLLaMA-70B, config.json; predictor rank derived from "
        f"5.66e9 parameters (8.08 %, {_POWERINFER})",
    },
    {
        **_GATED, **_7B, **_SWIGLU, "name": "llama2-7b",
        "source": "Hugging Face meta-llama/Llama-2-7b-hf, config.json",
    },
    {
        **_GATED, **_13B, **_SWIGLU, "name": "llama2-13b",
        "share_source": "SiLU is never exactly 0. 57 % is the share that must be kept by "
        f"magnitude ({_POWERINFER}, Table 3: LLaMA2-SwiGLU-13B 43 % sparse)",
        "source": "Hugging Face meta-llama/Llama-2-13b-hf, config.json",
    },
    {
        **_GATED, **_70B, **_SWIGLU, "name": "llama-3-70b", "vocab": 128256,
        "source": "Hugging Face meta-llama/Meta-Llama-3-70B, config.json",
    },
    {
        **_GATED, **_MIXTRAL, **_SWIGLU, "name": "mixtral-8x7b",
        "source": "Hugging Face mistralai/Mixtral-8x7B-v0.1, config.json: 8 experts, 2 per token",
    },
    _opt(
        "opt-125m", 12, 768, 12, _NO_PREDICTOR,
        share_source="none published for 125M (OPT-350M: 9.49 %, arXiv 2410.19274)",
    ),
    _opt(
        "opt-1.3b", 24, 2048, 32, _NO_PREDICTOR, active_share=0.0409,
        share_source="4.09 %, arXiv 2410.19274 (Ripple, later Neuralink)",
    ),
    _opt(
        "opt-6.7b", 32, 4096, 32,
        f"predictor rank chosen within the 128-256 of the published ones ({_FORK})",
        predictor_rank=256, active_share=0.0328,
        share_source=f"3.28 %, arXiv 2410.19274 (Ripple, later Neuralink); 2-4 % in {_POWERINFER}",
    ),
    _opt(
        "opt-13b", 40, 5120, 40,
        f"predictor rank derived from 0.88e9 parameters (6.71 %, {_POWERINFER}); the Kairox "
        "artifact's is not published and may be smaller, as for opt-30b",
        predictor_rank=859, active_share=0.03,
    ),
    _opt(
        "opt-30b", 48, 7168, 56,
        f"predictor rank derived from the 40.30e9 parameters of {_FORK}, abl_logs (the model's "
        "29.97e9 and a second down matrix of 9.87e9 taken off: 0.46e9)",
        predictor_rank=267, active_share=0.03,
    ),
    _opt(
        "opt-66b", 64, 9216, 72,
        f"predictor rank derived from 3.23e9 parameters (4.88 %, {_POWERINFER})",
        predictor_rank=1095, active_share=0.03,
    ),
    {
        **_FP16, "name": "falcon-40b-relu", "n_layers": 60, "d_model": 8192, "n_neurons": 32768,
        "n_heads": 128, "n_kv_heads": 8, "head_dim": 64, "vocab": 65024, "gated": False,
        "activation": "relu", "tied_embedding": True, "predictor_rank": 1477, "active_share": 0.05,
        "share_source": f"{_POWERINFER}, Table 3: Falcon(ReLU)-40B 95 % sparse",
        "source": "Hugging Face tiiuae/falcon-40b, config.json (parallel attention: the same "
        "matrices), SparseLLM/ReluFalcon-40B; predictor rank derived from 3.63e9 parameters "
        f"(8.68 %, {_POWERINFER})",
    },
    {
        **_GATED, **_MISTRAL, "name": "bamboo-7b", "activation": "drelu", "predictor_rank": 576,
        "active_share": 0.125,
        "share_source": f"10-15 % (the model card; 90 % sparse in {_POWERINFER}); 0.125 chosen",
        "source": "Hugging Face PowerInfer/Bamboo-base-v0_1, config.json; predictor rank chosen "
        f"within the 512-640 of the published ones ({_FORK})",
    },
    {
        **_GATED, **_MISTRAL, "name": "turbosparse-mistral-7b", "activation": "drelu",
        "active_share": 0.10, "share_source": f"{_TURBO}: 90 % sparse",
        "source": f"Hugging Face PowerInfer/TurboSparse-Mistral-Instruct, config.json; {_TURBO}; "
        f"{_NO_PREDICTOR} size",
    },
    {
        **_GATED, **_MIXTRAL, "name": "turbosparse-mixtral-47b", "activation": "drelu",
        "active_share": 0.0375,
        "share_source": f"{_TURBO}: 85 % sparse within an expert, so 15 % of 2 experts of 8",
        "source": f"Hugging Face PowerInfer/TurboSparse-Mixtral, config.json; {_TURBO}; 8 experts "
        f"of 14336 neurons, 2 per token; {_NO_PREDICTOR} size",
    },
    {
        **_GATED, "name": "sparseqwen2-7b", "n_layers": 28, "d_model": 3584, "n_neurons": 18944,
        "n_heads": 28, "n_kv_heads": 4, "vocab": 152064, "activation": "drelu",
        "predictor_rank": 679,
        "source": "Hugging Face PowerInfer/SparseQwen2-7B, config.json, and its card for dReLU; "
        f"predictor rank derived from the 3424.87 MiB on the device in {_FORK}, abl_logs "
        "(attention and head taken off: 0.43e9 parameters)",
    },
    {
        **_NEMOTRON, "name": "minitron-4b", "n_layers": 32, "d_model": 3072, "n_neurons": 9216,
        "n_heads": 24, "head_dim": 128,
        "source": f"Hugging Face nvidia/Minitron-4B-Base, config.json; {_NO_PREDICTOR}",
    },
    {
        **_NEMOTRON, "name": "minitron-8b", "n_layers": 32, "d_model": 4096, "n_neurons": 16384,
        "n_heads": 48, "head_dim": 128,
        "source": f"Hugging Face nvidia/Minitron-8B-Base, config.json; {_NO_PREDICTOR}",
    },
    {
        **_NEMOTRON, "name": "nemotron-4-15b", "n_layers": 32, "d_model": 6144,
        "n_neurons": 24576, "n_heads": 48, "head_dim": 128,
        "source": f"Nemotron-4 15B, arXiv 2402.16819; {_NO_PREDICTOR}",
    },
    {
        **_NEMOTRON, "name": "nemotron-4-340b", "n_layers": 96, "d_model": 18432,
        "n_neurons": 73728, "n_heads": 96, "head_dim": 192,
        "source": f"Nemotron-4 340B, arXiv 2406.11704; {_NO_PREDICTOR}",
    },
)  # fmt: skip
