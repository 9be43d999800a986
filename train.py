"""One run, from top to bottom: python train.py --config=configs/small.py. The same command again continues it."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from configs.command_line import parse
from configs.schema import Config, UserError, options
from data.dataset import open_text
from data.loader import StepBatches, held_out_batches, local_rows, train_batches
from evaluate import evaluate
from model.flops import flops_per_token, parameter_counts, peak_flops
from sample import continuations, encode_prompts
from training.checkpoint import Checkpoints
from training.mesh import batch_shape, batch_sharding, make_mesh
from training.metrics import Clock, MetricsWriter, plot_loss, read_metrics
from training.optimizer import make_optimizer
from training.run_folder import open_run
from training.runtime import (
    FAILED,
    INTERRUPTED,
    Interrupt,
    cache_dir,
    check_hosts_agree,
    on_first_process,
    run_command,
    start_jax,
)
from training.state import abstract_state, compute_dtype, create_state, params_sha256, replicated, split_model
from training.step import Metrics, make_eval_step, make_train_step


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    accept_changes: bool = False
    """Continue a run although options that make its result differ from its first start's. What changed is recorded in
    config.json and metrics.jsonl."""


def train(config: Config, accept_changes: bool = False) -> int:
    """Trains, or goes on training, until `config.steps`. Returns the exit code."""
    start_jax()
    first_process = jax.process_index() == 0
    say = tqdm.write if first_process else lambda text: None  # which leaves the progress bar whole
    check_hosts_agree("their config", json.dumps(dataclasses.asdict(config)))

    # The devices, and the sizes that follow from them.
    mesh = make_mesh(config.mesh)
    device = mesh.devices.flat[0]
    shape = batch_shape(config.batch, mesh)
    sharding = batch_sharding(mesh)
    dtype = compute_dtype(config.model, device.platform)
    flops, peak = flops_per_token(config.model, config.batch.sequence_length), peak_flops(device.device_kind)

    # The text, cut into rows.
    text = open_text(config.data, config.model.vocab_size, shape[2], shape[0] * shape[1], cache_dir())
    prompts = encode_prompts(text.tokenizer, config.eval.prompts, shape[2])
    check_hosts_agree("their text", text.fingerprint)

    # The run's folder, and how far the run in it has come.
    run_dir = Path(config.run_dir)
    text.tokenizer.require_same_in(run_dir / "tokenizer")
    changes = on_first_process(lambda: open_run(config, text.fingerprint, accept_changes))
    checkpoints = Checkpoints(run_dir, config.checkpoint.keep)
    start = checkpoints.latest() or 0
    if start == 0 and config.resume == "must":
        raise UserError(f"--resume=must, but {run_dir} holds no checkpoint")
    if start > config.steps or (start == config.steps and (run_dir / "summary.json").exists()):
        print(f"{run_dir} is complete: {start} steps; a longer run: --steps={2 * start} --accept_changes")
        return 0
    if first_process:
        text.tokenizer.save(run_dir / "tokenizer")
    writer = MetricsWriter(run_dir, start)
    if changes:
        writer.write({"step": start, "changes": changes})

    # The state, the data, and the two programs.
    graphdef, shapes = split_model(config.model, dtype)
    optimizer, rates = make_optimizer(config.optimizer, shapes, config.model.width, config.steps)
    if start:
        state, facts = checkpoints.restore(start, abstract_state(config.model, optimizer, mesh))
    else:
        state, facts = create_state(config.model, optimizer, mesh, config.seed), {"seconds": 0.0}
    bos = text.tokenizer.bos if config.data.mask_documents else None
    steps = StepBatches(text.train, text.weights, config.seed, shape, local_rows(shape, sharding), bos)
    batches = train_batches(steps, sharding, start, config.data.workers)
    held_out, held_out_bytes = held_out_batches(
        text.val, text.weights, config.eval.tokens, text.tokenizer.token_bytes, shape, sharding, bos
    )
    batch = next(batches)
    eval_step = make_eval_step(config.model, dtype, mesh)
    # Compiled once, here: a compiled program refuses other shapes, so no step can compile anew.
    train_step = make_train_step(config.model, dtype, mesh, optimizer, rates, config.optimizer.clip_norm)
    train_step = train_step.lower(state, batch).compile()
    say(
        f"{config.name}: {sum(parameter_counts(config.model).values()):,} parameters, {dtype.name}, on {mesh.size} "
        f"{device.device_kind} device(s); a step: {shape[0]} micro-batch(es) x {shape[1]} rows x {shape[2]} tokens"
        + (f"; continuing after step {start} of {config.steps}" if start else "")
    )

    clock = Clock(facts["seconds"], start)
    hidden = None if first_process else True  # None: where the output is no terminal
    bar = tqdm(total=config.steps, initial=start, unit="step", disable=hidden, dynamic_ncols=True)
    skipped, skipped_in_a_row = int(state.skipped_steps), 0
    unread: list[tuple[int, Metrics]] = []

    def report() -> None:
        """Reads the metrics of all steps since the last line, which waits for the newest, and writes its line."""
        nonlocal skipped, skipped_in_a_row
        for step, metrics in unread:
            values = jax.tree.map(lambda value: np.asarray(value).item(), metrics)
            skipped_in_a_row = skipped_in_a_row + 1 if values["skipped_steps"] > skipped else 0
            skipped = values["skipped_steps"]
            if skipped_in_a_row:
                bad = [group for group, norm in values["grad_norms"].items() if not math.isfinite(norm)]
                why = f"the gradient of {', '.join(bad)} is not finite" if bad else "it has no valid token"
                say(f"step {step} changed nothing: {why}; {skipped} step(s) skipped so far")
        unread.clear()
        steps_per_second, data_wait = clock.rates(step)
        tokens_per_second = steps_per_second * config.batch.tokens_per_step
        mfu = tokens_per_second * flops / (peak * mesh.size) if peak else None
        line = {"step": step, "tokens": step * config.batch.tokens_per_step, **values}
        line |= {"tokens_per_second": tokens_per_second, "mfu": mfu, "data_wait": data_wait}
        line |= {"seconds": clock.seconds}
        writer.write(line)
        told = f"loss {values['loss']:.4f}  {tokens_per_second:,.0f} tokens/s" + (f"  MFU {mfu:.1%}" if mfu else "")
        bar.set_postfix_str(told, refresh=False)
        bar.update(step - bar.n)
        if bar.disable:
            say(f"step {step}/{config.steps}  {told}")

    def measure(step: int) -> None:
        """Evaluates and samples the network as it is after `step` steps."""
        results = evaluate(eval_step, state.params, held_out, held_out_bytes)
        samples = continuations(
            graphdef,
            replicated(state.params, dtype, mesh),
            text.tokenizer,
            prompts,
            tokens=config.eval.sample_tokens,
            capacity=config.batch.sequence_length,
            seed=config.seed,
        )
        writer.write({"step": step, "tokens": step * config.batch.tokens_per_step, **results, "samples": samples})
        say(f"step {step}: validation loss {results['val_loss']:.4f}, {results['val_bpb']:.4f} bits per byte")

    if start == 0:
        measure(0)
    step, due, last = start, False, start == config.steps
    clock.start()
    with Interrupt() as interrupt:
        while not last:
            state, metrics = train_step(state, batch)
            step += 1
            if due:
                report()  # up to the step before, while this one runs
            with clock.waiting():
                batch = next(batches)
            unread.append((step, metrics))
            due = step % config.log.every_steps == 0 or step == config.steps
            last = step == config.steps or interrupt.requested
            evaluates = step % config.eval.every_steps == 0 or step == config.steps
            saves = step % config.checkpoint.every_steps == 0 or last
            if due and (evaluates or saves):
                report()  # what a checkpoint vouches for is written before it
                due = False
            if skipped_in_a_row >= config.max_skipped_steps:
                break
            if evaluates:
                jax.block_until_ready(state)
                with clock.paused():
                    measure(step)
            if saves:
                checkpoints.save(step, state, {"seconds": clock.seconds, "dataset": text.fingerprint})
    checkpoints.close()
    seconds = clock.seconds
    bar.close()
    if skipped_in_a_row >= config.max_skipped_steps:
        newest = (
            f"the newest checkpoint is of step {checkpoints.latest()}" if checkpoints.latest() else "none was saved"
        )
        say(f"stopped at step {step}: --max_skipped_steps={config.max_skipped_steps} in a row were skipped; {newest}")
        return FAILED
    if step < config.steps:
        say(f"stopped after step {step} of {config.steps}, saved in {run_dir}; the same command continues it")
        return INTERRUPTED

    # What came of it.
    digest = params_sha256(state.params)  # gathered from all processes
    if not first_process:
        return 0
    tokens = step * config.batch.tokens_per_step
    lines = read_metrics(run_dir)
    logged = [line for line in lines if "loss" in line][-1]
    measured = [line for line in lines if "val_loss" in line][-1]
    results = {"loss": logged["loss"], "val_loss": measured["val_loss"], "val_bpb": measured["val_bpb"]}
    summary = {
        "steps": step,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        **results,
        "skipped_steps": int(state.skipped_steps),
        "params_sha256": digest,
    }
    for text in measured["samples"]:
        print(f"---\n{text}")
    writer.close(options(config), results)
    plot_loss(run_dir)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"---\n{config.name}: {step} steps, {tokens:,} tokens in {seconds:.0f} s of training\n"
        f"training loss {results['loss']:.4f}, validation loss {results['val_loss']:.4f}, "
        f"{results['val_bpb']:.4f} bits per byte\n"
        f"in {run_dir}: loss.png, summary.json, metrics.jsonl, tensorboard/, checkpoints/, tokenizer/\n"
        f"sample:       python sample.py --run_dir={run_dir} --prompt='...'\n"
        f"train longer: the same command with --steps={2 * step} --accept_changes"
    )
    return 0


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    return train(config, arguments.accept_changes)


if __name__ == "__main__":
    run_command(main)
