"""nanochat's own checkpoints: model_NNNNNN.pt and meta_NNNNNN.json, as its scripts write them.

`PARTS` has its names of arrays. A kernel is [inputs, outputs] here, and [outputs, inputs] there. Tables there have rows
for more tokens than there are.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from configs.schema import BatchConfig, Config, ModelConfig, UserError, with_options

TABLE = "transformer.wte.weight"  # this name identifies the format
SIZES = {"n_layer": "depth", "n_embd": "width", "n_head": "heads", "n_kv_head": "kv_heads", "vocab_size": "vocab_size"}
"""nanochat's names of our options."""
PARTS = {
    "embed.table": TABLE,
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
    for ours, theirs in PARTS.items():
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


def config_of_checkpoint(checkpoint: Path, tokens_at_a_time: int) -> Config:
    """Return the network, the row and the rates of a checkpoint, to measure the network with `tokens_at_a_time` on a
    device. Raise LookupError, TypeError or ValueError if it is of another nanochat than the one of mid 2026."""
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
    step = meta.get("total_batch_size") or 2**19
    rows = math.gcd(step // length, max(1, tokens_at_a_time // length))
    given = {name: value for name, value in (meta.get("user_config") or {}).items() if value is not None}
    options = {f"{group}.peak_rate": float(given.get(name, rate)) for name, (rate, group) in RATES.items()}
    options |= TRAINED | {"value_embeds.peak_rate": options["embed.peak_rate"] / 2}
    config = Config(checkpoint.resolve().parent.name, model=model, batch=BatchConfig(length, step, rows))
    return with_options(config, {f"optimizer.{name}": value for name, value in options.items()})


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
        tables = (TABLE, "lm_head.weight", "value_embeds.")
        return {
            name: StoredTensor(tensor[:vocab_size] if name.startswith(tables) else tensor)
            for name, tensor in (lacking | tensors).items()
        }
    except Exception as error:  # torch's own, of several types
        raise UserError(f"{checkpoint} cannot be read as nanochat's: {error}") from error


def _meta(checkpoint: Path) -> dict[str, Any]:
    return json.loads(checkpoint.with_name(checkpoint.name.replace("model_", "meta_")).with_suffix(".json").read_text())
