"""Networks as transformers' NanoChatForCausalLM reads them.

ours [inputs, outputs]                transformers' [outputs, inputs]
embed.table                           model.embed_tokens.weight
blocks.N.attention.query.kernel       model.layers.N.self_attn.q_proj.weight      and so key, value, out
blocks.N.mlp.up.kernel, down          model.layers.N.mlp.fc1.weight, fc2
lm_head.kernel                        lm_head.weight
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from configs.schema import Config, ModelConfig, UserError, roles
from data.tokenizer import TextTokenizer
from interchange.safetensors import arrays_of, write_folder

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
        "dtype": "float32",
    }


def beyond_hf(model: ModelConfig) -> list[str]:
    """The options in use that transformers' class has not: all that change the network, differ from the plain one's
    and are not in `hf_config`."""
    known = {"depth", "width", "heads", "kv_heads", "head_dim", "vocab_size", "softcap", "rotary_base", "short_window"}
    change = {name for name, of in roles(ModelConfig).items() if not of} - known
    if "S" not in model.window_pattern[: max(model.depth - 1, 0)]:  # the last block has no window
        change.remove("window_pattern")
    return [f.name for f in fields(model) if f.name in change and getattr(model, f.name) != f.default]


def write_hf(out: Path, params: dict, config: Config, tokenizer: TextTokenizer) -> None:
    """A folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`. UserError where the
    network has what NanoChatForCausalLM cannot express."""
    if beyond := beyond_hf(config.model):
        raise UserError(
            f"transformers' NanoChatForCausalLM has no {', '.join(f'model.{name}' for name in beyond)}, which this "
            "network uses; --format=safetensors writes it"
        )
    arrays = {hf_name(name): turned(name, array) for name, array in arrays_of(params).items()}
    bos = next(token for token, i in tokenizer.special_tokens.items() if i == tokenizer.bos)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.bos, "pad_token_id": tokenizer.bos}
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": bos, "pad_token": bos}
    length = config.batch.sequence_length
    write_folder(
        out,
        arrays,
        tokenizer,
        {
            "config.json": hf_config(config, tokenizer.bos),
            "generation_config.json": ids,
            "tokenizer_config.json": {**tokens, "model_max_length": length, "clean_up_tokenization_spaces": False},
        },
    )
