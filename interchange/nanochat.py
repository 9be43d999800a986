"""nanochat's own checkpoints, of every generation: model_NNNNNN.pt and meta_NNNNNN.json, as its scripts write them.

nanochat's commits changed the network, and a checkpoint does not name its commit. Its arrays do:

from       date        its arrays                                  what else is of these commits
3a5e0bc    2025-10-13  matrices and two tables                     rotary base 10,000, logits capped at 15
f1bf69d    2025-12-09  tables with rows for more tokens            -
aa530cd    2026-01-11  resid_lambdas, x0_lambdas                   from fbc1484 on windows, S of half a row
9a88194    2026-01-16  value_embeds of every block, v0_lambdas     -
e85db6b    2026-01-16  of every other block, gates of 32 channels  -
aba30cb    2026-03-02  the same                                    logits capped at 20: asked for
6ed7d1d    2026-03-09  gates of 12 channels                        scale 1.15, base 100,000, cap 15, S of a third
a825e63    2026-03-14  smear and backout                           scale 1.2, S of a quarter
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from options.schema import BatchConfig, ModelConfig
from system.errors import UserError

TABLE = "transformer.wte.weight"
"""The table of the embeddings: this name identifies nanochat's arrays."""
SIZES = {"n_layer": "depth", "n_embd": "width", "n_head": "heads", "n_kv_head": "kv_heads", "vocab_size": "vocab_size"}
"""nanochat's names of our options."""
NAMES = {
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
LAMBDAS = {"resid_lambdas": True, "x0_lambdas": True}
WIDE_GATES = {"value_embeddings": True, "value_gate_channels": 32, "value_gate_limit": 2.0} | LAMBDAS
EARLY = {"rotary_base": 10_000.0}
GENERATIONS: dict[str, dict[str, Any]] = {
    "3a5e0bc": EARLY,
    "aa530cd": EARLY | LAMBDAS,
    "9a88194": EARLY | WIDE_GATES | {"value_embedding_every": 1},
    "e85db6b": EARLY | WIDE_GATES,
    "aba30cb": EARLY | WIDE_GATES | {"softcap": 20.0},
    "6ed7d1d": LAMBDAS | {"value_embeddings": True, "qk_scale": 1.15},
    "a825e63": LAMBDAS | {"value_embeddings": True, "qk_scale": 1.2, "smear": True, "backout": True},
}
"""The options of the network from each commit on."""
EXPERIMENTS = {
    "value_embed_A.weight": "e3f58b8 (2026-01-16)",
    "value_embed.weight": "0b58d70 (2026-01-16)",
    "bigram_lambdas": "59e36cc to 74554be (2026-01-25 to 28)",
}
"""Arrays of networks that nanochat tried for hours or days, and that ours cannot compute."""
RATES = {"embedding_lr": (0.3, "embed"), "unembedding_lr": (0.004, "lm_head"), "matrix_lr": (0.02, "muon")}
"""Rates that its fine-tuning takes from a checkpoint, those without them, and our groups."""
TRAINED = {"matrices.kind": "muon", "embed.weight_decay": 0.001, "lm_head.weight_decay": 0.01, "clip_norm": 1e9}
"""The rest of its newest optimizer that differs from ours. It clips nothing."""


def nanochat_name(name: str) -> str:
    """Return nanochat's name of a parameter of ours."""
    if value_embedding := re.fullmatch(r"blocks\.(\d+)\.attention\.value_embedding\.table", name):
        return f"value_embeds.{value_embedding[1]}.weight"
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Return the model_NNNNNN.pt of the newest step in a folder, or None if it has none."""
    home = Path(folder).expanduser()
    name = newest_model(path.name for path in home.glob("model_*.pt"))
    return home / name if name else None


def newest_model(names: Iterable[str]) -> str | None:
    """Return the model_NNNNNN.pt of the newest step among files' names, or None without any."""
    steps = {int(step[1]): name for name in names if (step := re.fullmatch(r"model_(\d+)\.pt", name))}
    return steps[max(steps)] if steps else None


def nanochat_tokenizer(folder: Path) -> Path | None:
    """Return the folder with the tokenizer of nanochat's checkpoints: this one, its tokenizer/, or the
    tokenizer/ of nanochat's base folder, two above."""
    homes = [folder, folder / "tokenizer", folder.absolute().parent.parent / "tokenizer"]
    return next((home for home in homes if (home / "tokenizer.pkl").exists()), None)


def generation_of(shapes: Mapping[str, tuple[int, ...]], cap: str | None) -> str:
    """Return the first commit whose network has arrays of these names and shapes. `cap` chooses between two with the
    same, e85db6b and aba30cb. Raise UserError if it must and does not, or chooses where it must not, or if no network
    here has such arrays."""
    for name, commits in EXPERIMENTS.items():
        if name in shapes:
            raise UserError(f"{name} is of {commits}, an experiment of nanochat's that is not converted")
    gates = {shape[-1] for name, shape in shapes.items() if name.endswith(".ve_gate.weight")}
    if gates == {32}:
        if cap is None:
            raise UserError(
                "nanochat capped the logits of networks with these arrays at 15, and from aba30cb (2026-03-02) on at "
                "20, and a checkpoint does not say at which: give --nanochat_cap=e85db6b if the network was trained by "
                "an earlier commit, or --nanochat_cap=aba30cb"
            )
        return cap
    if cap is not None:
        raise UserError(f"--nanochat_cap={cap} is for networks whose value embeddings have gates of 32 channels")
    if "smear_gate.weight" in shapes:
        return "a825e63"
    if gates:
        return "6ed7d1d"
    if "v0_lambdas" in shapes:
        return "9a88194"
    return "aa530cd" if "resid_lambdas" in shapes else "3a5e0bc"


def short_window(generation: str, length: int) -> int:
    """Return the earlier tokens that a position sees in S blocks, in a network for rows of `length` tokens."""
    rounded_share = {"6ed7d1d": 3, "a825e63": 4}
    if generation in rounded_share:
        return -(-length // rounded_share[generation] // 128) * 128
    return length // 2


def meta_file(checkpoint: Path) -> Path:
    """Return the meta file of a checkpoint."""
    return checkpoint.with_name(checkpoint.name.replace("model_", "meta_")).with_suffix(".json")


def describe_network(meta: dict[str, Any], generation: str) -> tuple[ModelConfig, int]:
    """Return the network of a checkpoint with this meta file, and the length of its rows. Raise LookupError, TypeError
    or ValueError for sizes that nanochat does not have."""
    theirs = {"window_pattern": "L"} | meta["model_config"]  # earlier networks had no windows
    length, pattern = theirs.pop("sequence_len"), theirs.pop("window_pattern").upper()
    sizes = {SIZES[name]: value for name, value in theirs.items()}
    model = ModelConfig(
        **sizes,
        head_dim=sizes["width"] // sizes["heads"],
        window_pattern=pattern,
        short_window=short_window(generation, length),
        **GENERATIONS[generation],
    )
    return model, length


def describe_training(meta: dict[str, Any]) -> tuple[int, bool, dict[str, Any]]:
    """Return the tokens of a checkpoint's steps, whether it was trained on conversations, and its optimizer's options
    by their names here."""
    given = {name: value for name, value in (meta.get("user_config") or {}).items() if value is not None}
    options = {f"{group}.peak_rate": float(given.get(name, rate)) for name, (rate, group) in RATES.items()}
    options |= TRAINED | {"value_embeds.peak_rate": options["embed.peak_rate"] / 2}
    batches = (meta.get("total_batch_size"), given.get("total_batch_size"), BatchConfig.tokens_per_step)
    tokens_per_step = next(size for size in batches if size and size > 0)  # -1 in user_config: chosen by the script
    pretrained = "max_seq_len" in meta  # only base_train.py writes it, at every commit
    return tokens_per_step, not pretrained, {f"optimizer.{name}": value for name, value in options.items()}


class StoredTensor:
    """A tensor of a checkpoint, read when it is indexed, as safetensors' slices are."""

    def __init__(self, tensor: Any):
        self.tensor = tensor

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index: slice) -> Float[np.ndarray, "..."]:
        return self.tensor[index].float().numpy()


def read_tensors(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors by nanochat's names, mapped and not yet read. Raise UserError if the file cannot be
    read, or without torch."""
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{checkpoint} is nanochat's, which torch reads: pip install torch ({error})") from error
    try:
        tensors = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
        return {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}  # of torch.compile
    except Exception as error:  # torch's own, of several types
        raise UserError(f"{checkpoint} cannot be read as nanochat's: {error}") from error


def without_spare_rows(tensors: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the tensors with tables of `vocab_size` rows. nanochat's have rows for a multiple of 64 tokens."""
    tables = (TABLE, "lm_head.weight", "value_embeds.")
    return {name: one[:vocab_size] if name.startswith(tables) else one for name, one in tensors.items()}


def with_gates(tensors: dict[str, Any], kv_heads: int, channels: int) -> dict[str, Any]:
    """Return the tensors of 9a88194 as those of e85db6b. Gates of zeros are 1 there, so each table is multiplied by the
    factor that its block had instead."""
    import torch

    factors = tensors["v0_lambdas"]
    gates = {f"transformer.h.{i}.attn.ve_gate.weight": torch.zeros(kv_heads, channels) for i in range(len(factors))}
    tables = {
        name: tensor.float() * factors[int(name.split(".")[1])].float()
        for name, tensor in tensors.items()
        if name.startswith("value_embeds.")
    }
    return {name: one for name, one in tensors.items() if name != "v0_lambdas"} | gates | tables
