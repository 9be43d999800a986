"""Networks with options that transformers' NanoChatForCausalLM has not: with a modeling file of our own beside the
weights (`trust_remote_code`), interchange/modeling_tokensum.py.

ours                                  there
embed.table, value_embedding.table    embed.weight
a kernel [inputs, outputs]            weight [outputs, inputs]
resid_lambdas.values                  resid_lambdas
"""

from pathlib import Path
from typing import Any

from configs.schema import SMEAR_CHANNELS, VALUE_GATE_CHANNELS, Config, ModelConfig
from model.attention import has_value_embedding, window_of

MODELING = Path(__file__).with_name("modeling_tokensum.py")
REMOTE = {
    *("qk_scale", "window_pattern", "value_embeddings", "resid_lambdas", "x0_lambdas", "smear", "backout"),
}
"""The options that it has, and transformers' class has not."""
TABLE = "embed.weight"  # tells these names from others


def remote_name(name: str) -> str:
    """The modeling file's name of a parameter of ours."""
    stem, _, kind = name.rpartition(".")
    return stem if kind == "values" else f"{stem}.weight"


def remote_config(config: Config, bos: int) -> dict[str, Any]:
    """config.json of a network with any options."""
    model = config.model
    layers = range(model.depth)
    return {
        "architectures": ["TokensumForCausalLM"],
        "model_type": "tokensum",
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.TokensumConfig",
            "AutoModelForCausalLM": f"{MODELING.stem}.TokensumForCausalLM",
        },
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": config.batch.sequence_length,
        "softcap": model.softcap,
        "rotary_base": model.rotary_base,
        "qk_scale": model.qk_scale,
        "windows": [window_of(model, layer) for layer in layers],
        "value_embeddings": [layer for layer in layers if has_value_embedding(model, layer)],
        "resid_lambdas": model.resid_lambdas,
        "x0_lambdas": model.x0_lambdas,
        "smear": model.smear,
        "backout": model.backout,
        "smear_channels": SMEAR_CHANNELS,
        "value_gate_channels": VALUE_GATE_CHANNELS,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": bos,  # a document ends where the next one starts
        "pad_token_id": None,
    }


def model_of_remote(theirs: dict[str, Any]) -> ModelConfig:
    """Return the network that a config.json as `remote_config` writes it is of. LookupError where it lacks a name."""
    windows = theirs["windows"]
    same = ("head_dim", "vocab_size", "softcap", "rotary_base", "qk_scale")
    return ModelConfig(
        depth=theirs["num_hidden_layers"],
        width=theirs["hidden_size"],
        heads=theirs["num_attention_heads"],
        kv_heads=theirs["num_key_value_heads"],
        window_pattern="".join("L" if window is None else "S" for window in windows),
        short_window=max((window for window in windows if window is not None), default=0),
        value_embeddings=bool(theirs["value_embeddings"]),
        **{name: theirs[name] for name in (*same, "resid_lambdas", "x0_lambdas", "smear", "backout")},
    )
