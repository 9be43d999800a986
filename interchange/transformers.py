"""Networks as transformers reads them: as NanoChatForCausalLM where that class has all that a network uses, else by a
modeling file of our own (interchange/remote_code.py).

ours [inputs, outputs]                transformers' [outputs, inputs]
embed.table                           model.embed_tokens.weight
blocks.N.attention.query.kernel       model.layers.N.self_attn.q_proj.weight      and so key, value, out
blocks.N.mlp.up.kernel, down          model.layers.N.mlp.fc1.weight, fc2
lm_head.kernel                        lm_head.weight
"""

import re
from collections.abc import Callable, Iterable, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from configs.schema import Config, ModelConfig, UserError, roles
from data.tokenizer import TextTokenizer
from interchange.remote_code import MODELING, REMOTE, remote_config, remote_name
from interchange.safetensors import Arrays, to_json, write_folder

HF_TABLE = "model.embed_tokens.weight"  # tells transformers' names from ours

HF_NAMES = {
    r"embed\.table": HF_TABLE,
    r"lm_head\.kernel": "lm_head.weight",
    r"blocks\.(\d+)\.attention\.query\.kernel": r"model.layers.\1.self_attn.q_proj.weight",
    r"blocks\.(\d+)\.attention\.key\.kernel": r"model.layers.\1.self_attn.k_proj.weight",
    r"blocks\.(\d+)\.attention\.value\.kernel": r"model.layers.\1.self_attn.v_proj.weight",
    r"blocks\.(\d+)\.attention\.out\.kernel": r"model.layers.\1.self_attn.o_proj.weight",
    r"blocks\.(\d+)\.mlp\.up\.kernel": r"model.layers.\1.mlp.fc1.weight",
    r"blocks\.(\d+)\.mlp\.down\.kernel": r"model.layers.\1.mlp.fc2.weight",
}


def hf_name(name: str) -> str:
    """transformers' name of a parameter of ours; the parameter's own, if its class has none."""
    found = [re.sub(ours, theirs, name) for ours, theirs in HF_NAMES.items() if re.fullmatch(ours, name)]
    return found[0] if found else name


def turned(name: str, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """From ours to transformers', or back: a matrix is transposed, a table is not."""
    return np.ascontiguousarray(array.T) if name.endswith(".kernel") else array


def hf_config(config: Config, bos: int) -> dict[str, Any]:
    """transformers' config.json of a network."""
    model = config.model
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": 4 * model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": config.batch.sequence_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "final_logit_softcapping": model.softcap,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": bos,  # a document ends where the next one starts
        "pad_token_id": None,  # else its row of the embedding would never learn
    }


IN_HF = {"depth", "width", "heads", "kv_heads", "head_dim", "vocab_size", "softcap", "rotary_base", "short_window"}
"""The options that `hf_config` expresses."""


def beyond_hf(model: ModelConfig) -> list[str]:
    """The options in use that transformers' class has not."""
    return _in_use(model, IN_HF)


def _in_use(model: ModelConfig, known: Set[str]) -> list[str]:
    """The options that change the network, differ from the plain one's and are not `known`."""
    change = {name for name, of in roles(ModelConfig).items() if not of} - known
    if "S" not in model.window_pattern[: max(model.depth - 1, 0)]:  # the last block has no window
        change.discard("window_pattern")
    return [f.name for f in fields(model) if f.name in change and getattr(model, f.name) != f.default]


def write_hf(
    out: Path,
    shards: Iterable[Arrays],
    config: Config,
    tokenizer: TextTokenizer,
    dtype: str = "float32",
    card: Callable[[bool], str] | None = None,
) -> None:
    """Write a folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`, of arrays by their
    dotted names, in `dtype`. A network that transformers' own class cannot express comes with the code that reads it,
    and needs `trust_remote_code=True`; `card` takes whether it does, and returns README.md. UserError where that code
    does not know an option, either."""
    if unknown := _in_use(config.model, IN_HF | REMOTE):
        raise UserError(
            f"{MODELING.name} has no {', '.join(f'model.{name}' for name in unknown)}, which this network uses; "
            "--format=safetensors writes it"
        )
    own = bool(beyond_hf(config.model))
    named, described = (remote_name, remote_config) if own else (hf_name, hf_config)
    bos = next(token for token, i in tokenizer.special_tokens.items() if i == tokenizer.bos)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.bos, "pad_token_id": tokenizer.bos}
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": bos, "pad_token": bos}
    length = config.batch.sequence_length
    files = {
        "config.json": described(config, tokenizer.bos) | {"dtype": dtype},
        "generation_config.json": ids,
        "tokenizer_config.json": {**tokens, "model_max_length": length, "clean_up_tokenization_spaces": False},
    }
    texts = {name: to_json(content) for name, content in files.items()} | {"tokenizer.json": tokenizer.json_with_bos}
    texts |= ({MODELING.name: MODELING.read_text()} if own else {}) | ({"README.md": card(own)} if card else {})
    written = (
        {named(name): turned(name, array).astype(dtype, copy=False) for name, array in arrays.items()}
        for arrays in shards
    )
    write_folder(out, written, texts)
