"""Formats of networks in folders: the names and shapes of arrays, and config.json, of four kinds. The last are
nanochat's own checkpoints.

ours                               NanoChatForCausalLM                             interchange/modeling_tokensum.py
embed.table                        model.embed_tokens.weight                       embed.weight
blocks.N.attention.query.kernel    model.layers.N.self_attn.q_proj.weight          blocks.N.attention.query.weight
blocks.N.mlp.up.kernel             model.layers.N.mlp.fc1.weight                   blocks.N.mlp.up.weight
resid_lambdas.values               -                                               resid_lambdas

A kernel is [inputs, outputs] here, and [outputs, inputs] there.
"""

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors import safe_open

from model.attention import has_value_embedding
from model.kernels import window_of
from options.schema import SMEAR_CHANNELS, VALUE_GATE_CHANNELS, BatchConfig, Config, ModelConfig
from run.init_from import function_options
from system.errors import UserError

Arrays = dict[str, Float[np.ndarray, "..."]]
MODELING = Path(__file__).with_name("modeling_tokensum.py")
HF_TABLE, OWN_TABLE = "model.embed_tokens.weight", "embed.weight"  # these names identify each
NANOCHAT_TABLE = "transformer.wte.weight"
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
    if NANOCHAT_TABLE in stored:
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
        "value_gate_channels": VALUE_GATE_CHANNELS,
        "options": function_options(model),  # as interchange/convert.py reads them
    }


def stored_arrays(folder: Path) -> dict[str, Any]:
    """Return the arrays in a folder's files, by name, not yet read. Raise UserError if they are missing or
    incomplete."""
    files = sorted(folder.glob("*.safetensors"))
    if checkpoint := newest_checkpoint(folder):
        return checkpoint_arrays(checkpoint)
    if not files:
        raise UserError(f"{folder} has no network: no *.safetensors there")
    try:
        opened = [safe_open(path, "numpy") for path in files]
        return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors' own, for an incomplete file
        raise UserError(f"the network in {folder} cannot be read: {error}") from error


# nanochat's own checkpoints: model_NNNNNN.pt and meta_NNNNNN.json, as its scripts write them. Tables there have rows
# for more tokens than there are.
SIZES = {"n_layer": "depth", "n_embd": "width", "n_head": "heads", "n_kv_head": "kv_heads", "vocab_size": "vocab_size"}
"""nanochat's names of our options."""
THEIR_NAMES = {
    "embed.table": NANOCHAT_TABLE,
    "lm_head.kernel": "lm_head.weight",
    "blocks.": "transformer.h.",
    "attention.query": "attn.c_q",
    "attention.key": "attn.c_k",
    "attention.value_gate": "attn.ve_gate",
    "attention.value": "attn.c_v",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    ".kernel": ".weight",
    ".values": "",
}
"""Parts of our parameters' names, and of nanochat's."""
FEATURES = ("value_embeddings", "resid_lambdas", "x0_lambdas", "smear", "backout")
RATES = {"embedding_lr": (0.3, "embed"), "unembedding_lr": (0.004, "lm_head"), "matrix_lr": (0.02, "muon")}
"""Rates that its fine-tuning takes from a checkpoint, those without them, and our groups."""
TRAINED = {"matrices.kind": "muon", "embed.weight_decay": 0.001, "lm_head.weight_decay": 0.01, "clip_norm": 1e9}
"""The rest of its optimizer that differs from ours. It clips nothing."""


def nanochat_name(name: str) -> str:
    """Return nanochat's name of a parameter of ours."""
    if value_embedding := re.fullmatch(r"blocks\.(\d+)\.attention\.value_embedding\.table", name):
        return f"value_embeds.{value_embedding[1]}.weight"
    for ours, theirs in THEIR_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Return the model_NNNNNN.pt of the newest step in a folder, or None if it has none."""
    found = Path(folder).expanduser().glob("model_*.pt")
    steps = {int(step[1]): path for path in found if (step := re.fullmatch(r"model_(\d+)\.pt", path.name))}
    return steps[max(steps)] if steps else None


def nanochat_tokenizer(folder: Path) -> Path | None:
    """Return the folder with the tokenizer of nanochat's checkpoints: this one, its tokenizer/, or the
    tokenizer/ of nanochat's base folder, two above."""
    homes = [folder, folder / "tokenizer", folder.absolute().parent.parent / "tokenizer"]
    return next((home for home in homes if (home / "tokenizer.pkl").exists()), None)


def describe_checkpoint(checkpoint: Path) -> tuple[ModelConfig, int, int, dict[str, Any]]:
    """Return the network of a checkpoint, the length of its rows, the tokens of its steps, and its optimizer's options
    by their names here. Raise LookupError, TypeError or ValueError if it is of another nanochat than the one of mid
    2026."""
    meta = _meta(checkpoint)
    theirs = {"window_pattern": "L"} | meta["model_config"]  # older ones had no windows
    length, pattern = theirs.pop("sequence_len"), theirs.pop("window_pattern").upper()
    sizes = {SIZES[name]: value for name, value in theirs.items()}
    model = ModelConfig(
        **sizes,
        head_dim=sizes["width"] // sizes["heads"],
        window_pattern=pattern,
        qk_scale=1.2,
        **dict.fromkeys(FEATURES, True),
    )
    given = {name: value for name, value in (meta.get("user_config") or {}).items() if value is not None}
    options = {f"{group}.peak_rate": float(given.get(name, rate)) for name, (rate, group) in RATES.items()}
    options |= TRAINED | {"value_embeds.peak_rate": options["embed.peak_rate"] / 2}
    optimizer = {f"optimizer.{name}": value for name, value in options.items()}
    return model, length, meta.get("total_batch_size") or BatchConfig.tokens_per_step, optimizer


class StoredTensor:
    """A tensor of a checkpoint, read when it is indexed, as safetensors' slices are."""

    def __init__(self, tensor: Any):
        self.tensor = tensor

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index: slice) -> Float[np.ndarray, "..."]:
        return self.tensor[index].float().numpy()


def checkpoint_arrays(checkpoint: Path) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by nanochat's names, not yet read. As in nanochat, factors that an older checkpoint
    lacks are 1 and 0. Raise UserError if it cannot be read, or without torch."""
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{checkpoint} is nanochat's, which torch reads: pip install torch ({error})") from error
    try:
        tensors = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
        sizes = _meta(checkpoint)["model_config"]
        depth, vocab_size = sizes["n_layer"], sizes["vocab_size"]
        tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}  # of torch.compile
        lacking = {"resid_lambdas": torch.ones(depth), "x0_lambdas": torch.zeros(depth)}
        tables = (NANOCHAT_TABLE, "lm_head.weight", "value_embeds.")
        return {
            name: StoredTensor(tensor[:vocab_size] if name.startswith(tables) else tensor)
            for name, tensor in (lacking | tensors).items()
        }
    except Exception as error:  # torch's own, of several types
        raise UserError(f"{checkpoint} cannot be read as nanochat's: {error}") from error


def _meta(checkpoint: Path) -> dict[str, Any]:
    return json.loads(checkpoint.with_name(checkpoint.name.replace("model_", "meta_")).with_suffix(".json").read_text())
