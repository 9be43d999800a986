"""Verification of an export: the network in transformers and the trained one read the same text."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from configs.schema import ModelConfig, UserError
from model.loss import softcap
from training.state import split_model

BOUND = 1e-3  # of logits in float32: ten times the observed effect of the order of sums


def require_transformers() -> None:
    """Raise UserError if torch or transformers is not installed."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--verify loads the network in transformers: pip install torch transformers ({error})"
        ) from error


def largest_difference(
    folder: Path, params: dict, model: ModelConfig, tokens: Int[np.ndarray, "rows length"]
) -> tuple[float, float]:
    """Return the largest difference between the capped logits of the network in `folder`, loaded by transformers, and
    of ours, both in float32; and the standard deviation of ours, for comparison. `params`: rounded like the
    folder's."""
    import torch
    from transformers import AutoModelForCausalLM

    graphdef, _ = split_model(model, jnp.dtype("float32"))
    logits = jax.jit(lambda params, tokens: softcap(nnx.merge(graphdef, params)(tokens)[0], model.softcap))
    ours: Float[np.ndarray, "rows length vocab"] = np.asarray(logits(params, tokens))
    network = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        theirs = network(torch.tensor(tokens)).logits.numpy()
    return float(np.max(np.abs(ours - theirs))), float(np.std(ours))


def verify(folder: Path, params: dict, model: ModelConfig, dtype: str, tokens: np.ndarray) -> str:
    """Return a line on the difference between the logits of the network in `folder` and ours on `tokens`. Above the
    bound, remove the folder and raise RuntimeError."""
    rounded = jax.tree.map(lambda leaf: leaf.astype(np.dtype(dtype)).astype(np.float32), params)
    difference, size = largest_difference(folder, rounded, model, tokens)
    result = (
        f"logits of {tokens.size} tokens of Python's library differ by at most {difference:.2g} (spread {size:.2g})"
    )
    if not difference <= BOUND:  # nan included
        shutil.rmtree(folder)
        raise RuntimeError(f"{result}: above {BOUND}, so {folder} was removed: this is a defect of the export")
    return result
