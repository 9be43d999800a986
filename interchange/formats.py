"""Formats of networks in folders: the names and shapes of arrays, and config.json. interchange/nanochat.py has those of
nanochat's own checkpoints.

ours                               NanoChatForCausalLM                             interchange/modeling_tokensum.py
embed.table                        model.embed_tokens.weight                       embed.weight
blocks.N.attention.query.kernel    model.layers.N.self_attn.q_proj.weight          blocks.N.attention.query.weight
blocks.N.mlp.up.kernel             model.layers.N.mlp.fc1.weight                   blocks.N.mlp.up.weight
resid_lambdas.values               -                                               resid_lambdas

A kernel is [inputs, outputs] here, and [outputs, inputs] there.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors import safe_open

from interchange.nanochat import TABLE, nanochat_name
from model.attention import has_value_embedding
from model.kernels import window_of
from options.schema import SMEAR_CHANNELS, Config, ModelConfig
from run.init_from import function_options
from system.errors import UserError

Arrays = dict[str, Float[np.ndarray, "..."]]
MODELING = Path(__file__).with_name("modeling_tokensum.py")
HF_TABLE, OWN_TABLE = "model.embed_tokens.weight", "embed.weight"  # these names identify each
HF_NAMES = {
    "embed.table": HF_TABLE,
    "lm_head.kernel": "lm_head.weight",
    "blocks.": "model.layers.",
    "attention.query.kernel": "self_attn.q_proj.weight",
    "attention.key.kernel": "self_attn.k_proj.weight",
    "attention.value.kernel": "self_attn.v_proj.weight",
    "attention.out.kernel": "self_attn.o_proj.weight",
    "mlp.up.kernel": "mlp.fc1.weight",
    "mlp.down.kernel": "mlp.fc2.weight",
}
"""Parts of our parameters' names, and of NanoChatForCausalLM's."""


def hf_name(name: str) -> str:
    """Return transformers' name of a parameter of ours."""
    for ours, theirs in HF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def own_name(name: str) -> str:
    """Return the modeling file's name of a parameter of ours."""
    stem, _, kind = name.rpartition(".")
    return stem if kind == "values" else f"{stem}.weight"


def spelling(stored: Collection[str]) -> tuple[Callable[[str], str], bool]:
    """Return a folder's names of our parameters, and whether its matrices are [outputs, inputs], as in torch."""
    if HF_TABLE in stored:
        return hf_name, True
    if TABLE in stored:
        return nanochat_name, True
    return (own_name, True) if OWN_TABLE in stored else (str, False)


def turned(name: str, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Turn an array from ours to transformers', or back: a matrix is transposed, a table is not."""
    return np.ascontiguousarray(array.T) if name.endswith(".kernel") else array


def _sizes(config: Config) -> dict[str, Any]:
    """Return what both kinds of config.json have."""
    model = config.model
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": config.batch.sequence_length,
        "tie_word_embeddings": False,
    }


def hf_config(config: Config) -> dict[str, Any]:
    """Return NanoChatForCausalLM's config.json of a network, without its special tokens."""
    return _sizes(config) | {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "intermediate_size": 4 * config.model.width,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.model.rotary_base},
        "final_logit_softcapping": config.model.softcap,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def model_of_hf(theirs: dict[str, Any]) -> ModelConfig:
    """Return the network of NanoChatForCausalLM's config.json. LookupError if it lacks a name."""
    heads, width = theirs["num_attention_heads"], theirs["hidden_size"]
    return ModelConfig(
        depth=theirs["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=theirs.get("num_key_value_heads") or heads,
        head_dim=theirs.get("head_dim") or width // heads,
        vocab_size=theirs["vocab_size"],
        softcap=theirs.get("final_logit_softcapping", 15.0),
        rotary_base=(theirs.get("rope_parameters") or theirs).get("rope_theta", 10_000.0),
    )


def own_config(config: Config) -> dict[str, Any]:
    """Return the modeling file's config.json of a network with any options, without its special tokens."""
    model, layers = config.model, range(config.model.depth)
    same = ("softcap", "rotary_base", "qk_scale", "resid_lambdas", "x0_lambdas", "smear", "backout")
    return _sizes(config) | {
        "architectures": ["TokensumForCausalLM"],
        "model_type": "tokensum",
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.TokensumConfig",
            "AutoModelForCausalLM": f"{MODELING.stem}.TokensumForCausalLM",
        },
        **{name: getattr(model, name) for name in same},
        "windows": [window_of(model, layer) for layer in layers],
        "value_embeddings": [layer for layer in layers if has_value_embedding(model, layer)],
        "smear_channels": SMEAR_CHANNELS,
        "value_gate_channels": model.value_gate_channels,
        "value_gate_limit": model.value_gate_limit,
        "options": function_options(model),  # as interchange/convert.py reads them
    }


def stored_arrays(folder: Path) -> dict[str, Any]:
    """Return the arrays in a folder's safetensors, by name, not yet read. Raise UserError if they are missing or
    incomplete."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no network: no *.safetensors there")
    try:
        opened = [safe_open(path, "numpy") for path in files]
        return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors' own, for an incomplete file
        raise UserError(f"the network in {folder} cannot be read: {error}") from error
