"""Whether a network that was written for transformers is the one that was trained: both read the same text."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from configs.schema import ModelConfig, UserError
from model.loss import softcap
from training.state import split_model

BOUND = 1e-3  # of logits in float32: ten times what the order of sums was seen to make of them


def require_transformers() -> None:
    """UserError where what loads the network is not installed."""
    try:
        from transformers import AutoModelForCausalLM  # imports torch, too
    except ImportError as error:
        raise UserError(
            f"--verify loads the network in transformers: pip install torch transformers ({error})"
        ) from error
    assert AutoModelForCausalLM


def largest_difference(
    folder: Path, params: dict, model: ModelConfig, tokens: Int[np.ndarray, "rows length"]
) -> tuple[float, float]:
    """Of the capped logits of the network in `folder`, as transformers loads it, and of ours, both in float32; and the
    standard deviation of ours, beside which to see it. `params`: as the folder has them, rounded where it is."""
    import torch
    from transformers import AutoModelForCausalLM

    graphdef, _ = split_model(model, jnp.dtype("float32"))
    logits = jax.jit(lambda params, tokens: softcap(nnx.merge(graphdef, params)(tokens)[0], model.softcap))
    ours: Float[np.ndarray, "rows length vocab"] = np.asarray(logits(params, tokens))
    network = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        theirs = network(torch.tensor(tokens)).logits.numpy()
    return float(np.max(np.abs(ours - theirs))), float(np.std(ours))
