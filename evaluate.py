"""What a run's newest checkpoint is worth: python evaluate.py --run_dir=runs/small, or with --tasks=core."""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
from jax.sharding import Mesh

from configs.command_line import parse_arguments
from configs.files import write_whole
from configs.schema import FilePath, MeshConfig, Positive, Range, UserError
from data.dataset import open_text
from data.loader import held_out_batches
from data.tokenizer import load_tokenizer
from evaluation.benchmarks import Benchmarks, append_to_log, open_log, plot
from evaluation.bits_per_byte import evaluate
from evaluation.core import read_bundle
from run.folder import Run, load_run
from run.runtime import cache_dir, check_hosts_agree, on_first_process, run_command, start_jax
from training.mesh import batch_sharding, make_mesh
from training.state import compute_dtype, params_sha256
from training.step import make_eval_step


@dataclass(frozen=True)
class Arguments:
    """Validation loss and bits per byte of a run's newest checkpoint, or its benchmarks, as one JSON line."""

    run_dir: FilePath
    """Folder of the run."""
    tokens: Positive[int] | None = None
    """Tokens of the held-out set. Default: the run's own `eval.tokens`."""
    tasks: str = ""
    """Benchmarks in place of held-out text: `core`, of the bundle that DCLM and nanochat use. Each item's result goes
    to the run's folder under core/; the same command again continues there."""
    bundle: FilePath = ""
    """Folder of that bundle: core.yaml, eval_meta_data.csv and eval_data/."""
    items: Positive[int] | None = None
    """Take so many items of each task, always the same; default: all."""
    prompt_tokens: Annotated[int, Range(lambda n: n > 1, "a prompt has at least 2 tokens")] | None = None
    """A longer prompt loses its first tokens. Default: as many as the run's rows have. (nanochat cuts the prompts of
    networks that have a `max_seq_len`; its own read ten times their rows.)"""
    mesh: MeshConfig = MeshConfig()
    """Arrangement of the devices here, whatever the run's own; `fsdp` and `tensor` for a network too large for one."""


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if arguments.tasks not in ("", "core"):
        raise UserError(f"--tasks={arguments.tasks} cannot work: core is the only benchmark")
    if arguments.tasks and not arguments.bundle:
        raise UserError("--tasks=core needs --bundle=DIR, the folder that holds core.yaml")
    start_jax()
    mesh = make_mesh(arguments.mesh)
    run = load_run(arguments.run_dir, mesh)
    results = core(arguments, run, mesh) if arguments.tasks else held_out(arguments, run, mesh)
    print(json.dumps({"run_dir": arguments.run_dir, "step": run.step, **results}))
    return 0


def held_out(arguments: Arguments, run: Run, mesh: Mesh) -> dict:
    """Validation loss and bits per byte of the run's own text."""
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
    return evaluate(eval_step, run.params, batches, text_bytes)


def core(arguments: Arguments, run: Run, mesh: Mesh) -> dict:
    """CORE and its tasks' figures; in the run's folder a line an item, the figures, and a picture of them."""
    config, first = run.config, jax.process_index() == 0
    benchmarks = Benchmarks(
        read_bundle(arguments.bundle, arguments.items),
        load_tokenizer(Path(arguments.run_dir) / "tokenizer"),
        config.model,
        config.batch,
        compute_dtype(config.model, jax.default_backend()),
        mesh,
        arguments.prompt_tokens,
    )
    check_hosts_agree("their bundle", json.dumps(benchmarks.facts))
    facts = benchmarks.facts | {"step": run.step, "params_sha256": params_sha256(run.params)}
    name = f"step_{run.step}" + (f"_items_{arguments.items}" if arguments.items else "")
    folder = Path(arguments.run_dir) / "core" / name
    log = folder / "items.jsonl"
    done = on_first_process(lambda: open_log(log, facts))
    results = benchmarks(
        run.params,
        done,
        record=partial(append_to_log, log) if first else lambda lines: None,
        say=partial(print, file=sys.stderr) if first else lambda text: None,
    )
    if first:
        write_whole(folder / "core.json", json.dumps(facts | results, indent=2) + "\n")
        plot(results, f"{config.name}, step {run.step}", folder / "core.png")
    return results


if __name__ == "__main__":
    run_command(main)
