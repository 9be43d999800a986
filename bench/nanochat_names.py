"""nanochat's names of our parameters, and its network with them."""

import os
import sys
from typing import Any

from configs.schema import Config, ModelConfig, UserError
from interchange.safetensors import arrays_of
from interchange.transformers import turned

NAMES = {
    "embed.table": "transformer.wte.weight",
    "lm_head.kernel": "lm_head.weight",
    "smear_gate.kernel": "smear_gate.weight",
    ".values": "",
    "blocks.": "transformer.h.",
    "attention.query.kernel": "attn.c_q.weight",
    "attention.key.kernel": "attn.c_k.weight",
    "attention.value.kernel": "attn.c_v.weight",
    "attention.out.kernel": "attn.c_proj.weight",
    "attention.value_gate.kernel": "attn.ve_gate.weight",
    "mlp.up.kernel": "mlp.c_fc.weight",
    "mlp.down.kernel": "mlp.c_proj.weight",
}
"""Parts of our parameters' names, and of nanochat's."""


def their_name(name: str) -> str:
    """Return nanochat's name of a parameter of ours."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    if name.endswith("attention.value_embedding.table"):
        return f"value_embeds.{name.split('.')[2]}.weight"
    return name


def new_network(model: ModelConfig, length: int, dtype: str = "float32", compiled: bool = False) -> Any:
    """Return nanochat's network (torch) of these sizes, for rows of `length` tokens, freshly initialized. `compiled`:
    its optimizer's steps may be compiled. Only the first call in a process chooses that and `dtype`. UserError if
    NANOCHAT_DIR names no checkout."""
    if "NANOCHAT_DIR" not in os.environ:
        raise UserError("NANOCHAT_DIR names no checkout of nanochat")
    os.environ |= {"NANOCHAT_DTYPE": dtype, "TORCHDYNAMO_DISABLE": str(int(not compiled))}
    sys.path.append(os.environ["NANOCHAT_DIR"])
    from nanochat.gpt import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    sizes = {"n_layer": model.depth, "n_head": model.heads, "n_kv_head": model.kv_heads, "n_embd": model.width}
    sizes |= {"vocab_size": model.vocab_size, "sequence_len": length, "window_pattern": model.window_pattern}
    network = GPT(GPTConfig(**sizes))
    network.init_weights()
    return network


def their_network(config: Config, params: dict) -> Any:
    """Return nanochat's network in float32, not compiled, with our parameters. UserError if NANOCHAT_DIR names no
    checkout, or if the config leaves out a feature of nanochat's."""
    network = new_network(config.model, config.batch.sequence_length)
    import torch

    by_name = dict(network.named_parameters())
    with torch.no_grad():
        for name, array in arrays_of(params).items():
            by_name.pop(their_name(name)).copy_(torch.tensor(turned(name, array)))
    if by_name:
        raise UserError(f"nanochat's network has what the config leaves out: {', '.join(by_name)}")
    return network
