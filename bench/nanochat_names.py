"""nanochat's names of our parameters."""

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
    """nanochat's name of a parameter of ours."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    if name.endswith("attention.value_embedding.table"):
        return f"value_embeds.{name.split('.')[2]}.weight"
    return name
