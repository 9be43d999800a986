"""Import nanochat's modules from the checkout NANOCHAT_DIR, and name our parameters as it does."""

import importlib
import os
from types import ModuleType

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


def import_nanochat(patch, *names: str) -> tuple[ModuleType, ...]:
    """Return modules of its package, in float32 and without compilation."""
    patch.setenv("NANOCHAT_DTYPE", "float32")
    patch.setenv("TORCHDYNAMO_DISABLE", "1")
    patch.syspath_prepend(os.environ["NANOCHAT_DIR"])
    return tuple(importlib.import_module(f"nanochat.{name}") for name in names)
