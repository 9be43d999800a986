"""Validation loss and bits per byte of a run's newest checkpoint: python evaluate.py --run_dir=runs/small."""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import json
from dataclasses import dataclass

import jax

from configs.command_line import parse_arguments
from configs.schema import FilePath, MeshConfig, Positive, UserError
from data.dataset import open_text
from data.loader import held_out_batches
from evaluation.bits_per_byte import evaluate
from run.folder import load_run
from run.runtime import cache_dir, run_command, start_jax
from training.mesh import batch_sharding, make_mesh
from training.state import compute_dtype
from training.step import make_eval_step


@dataclass(frozen=True)
class Arguments:
    """Validation loss and bits per byte of a run's newest checkpoint, as one JSON line."""

    run_dir: FilePath
    """Folder of the run."""
    tokens: Positive[int] | None = None
    """Tokens of the held-out set. Default: the run's own `eval.tokens`."""
    mesh: MeshConfig = MeshConfig()
    """Arrangement of the devices here, whatever the run's own; `fsdp` and `tensor` for a network too large for one."""


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    start_jax()
    mesh = make_mesh(arguments.mesh)
    run = load_run(arguments.run_dir, mesh)
    config = run.config
    rows = config.batch.rows_per_device * mesh.shape["data"] * mesh.shape["fsdp"]
    shape = (1, rows, config.batch.sequence_length)
    text = open_text(config.data, config.model.vocab_size, shape[2], 1, cache_dir())
    if text.fingerprint != run.dataset:
        raise UserError(
            f"{config.data.source} is not the text that {arguments.run_dir} was trained on: its fingerprint is "
            f"{text.fingerprint}, the run's {run.dataset}; evaluate where that text is"
        )
    batches, text_bytes = held_out_batches(
        text.val,
        text.weights,
        arguments.tokens or config.eval.tokens,
        text.tokenizer.token_bytes,
        shape,
        batch_sharding(mesh),
        text.tokenizer.bos if config.data.mask_documents else None,
    )
    eval_step = make_eval_step(config.model, compute_dtype(config.model, jax.default_backend()), mesh)
    results = evaluate(eval_step, run.params, batches, text_bytes)
    print(json.dumps({"run_dir": arguments.run_dir, "step": run.step, **results}))
    return 0


if __name__ == "__main__":
    run_command(main)
