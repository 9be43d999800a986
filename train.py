"""One run, from top to bottom: python train.py --config=configs/small.py. The same command again continues it."""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import dataclasses
import gc
import json
from dataclasses import dataclass
from pathlib import Path

import jax
from tqdm import tqdm

from configs.command_line import parse
from configs.schema import Config, UserError, options
from data.dataset import open_text
from data.loader import StepBatches, held_out_batches, local_rows, train_batches
from evaluation.bits_per_byte import evaluate
from evaluation.generation import continuations, encode_prompts, make_generate
from interchange.init_from import read_params, require_same_network
from model.flops import flops_per_token, parameter_counts, peak_flops
from run.checkpoint import Checkpoints
from run.folder import RunLock, open_run, record_files
from run.metrics import Clock, MetricsWriter, plot_loss, read_metrics, summarize, write_summary
from run.monitor import Monitor
from run.runtime import FAILED, Stop, cache_dir, check_hosts_agree, on_first_process, run_command, start_jax
from training.build import build
from training.state import params_sha256

ROLLED_BACK = -1  # no exit code


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    accept_changes: bool = False
    """Continue a run although options that make its result differ from its first start's. What changed is recorded in
    config.json and metrics.jsonl."""


def train(config: Config, lock: RunLock, accept_changes: bool = False) -> int:
    """Trains, or goes on training, until `config.steps`. Returns the exit code, or ROLLED_BACK to be called again."""
    start_jax()
    first_process = jax.process_index() == 0
    say = tqdm.write if first_process else lambda text: None  # which leaves the progress bar whole
    check_hosts_agree("their config", json.dumps(dataclasses.asdict(config)))

    # The devices, and the sizes that follow from them.
    built = build(config)
    mesh, device, dtype = built.mesh, built.mesh.devices.flat[0], built.dtype
    shape, sharding = built.batch_shape, built.batch_sharding
    flops, peak = flops_per_token(config.model, config.batch.sequence_length), peak_flops(device.device_kind)

    # The text, cut into rows.
    text = open_text(config.data, config.model.vocab_size, shape[2], shape[0] * shape[1], cache_dir())
    prompts = encode_prompts(text.tokenizer, config.eval.prompts, shape[2])
    check_hosts_agree("their text", text.fingerprint)

    # The run's folder, which no other process may write to meanwhile.
    run_dir = Path(config.run_dir)
    if config.init_from and not run_dir.exists():
        require_same_network(config, text.tokenizer)
    text.tokenizer.require_same_in(run_dir / "tokenizer")
    changes = on_first_process(lambda: open_run(config, text.fingerprint, accept_changes, lock))
    elsewhere = config.checkpoint.folder
    checkpoints = Checkpoints(elsewhere or run_dir, config.checkpoint, record_files(run_dir) if elsewhere else ())
    newest = max(checkpoints.steps(), default=0)
    if newest == 0 and config.resume == "must":
        raise UserError(f"--resume=must, but {run_dir} holds no checkpoint")
    if newest > config.steps or (newest == config.steps and (run_dir / "summary.json").exists()):
        print(f"{run_dir} is complete: {newest} steps; a longer run: --steps={2 * newest} --accept_changes")
        return 0

    # The state, from the newest checkpoint that can be read; the record so far; the data from there on.
    state, facts = checkpoints.restore_newest(built.abstract_state, say) or (
        built.create_state(),
        {"step": 0, "seconds": 0.0, "losses": []},
    )
    start = facts["step"]
    if start == 0 and config.init_from:
        state = state._replace(params=read_params(config, built.abstract_state.params))
    if first_process:
        text.tokenizer.save(run_dir / "tokenizer")
    writer = MetricsWriter(run_dir, start)
    if changes:
        writer.write({"step": start, "changes": changes})
    rollbacks = on_first_process(lambda: [line for line in read_metrics(run_dir) if "rollback" in line])
    skipped_batches = sum(line["rollback"]["skipped_batches"] for line in rollbacks)
    bos = text.tokenizer.bos if config.data.mask_documents else None
    steps = StepBatches(text.train, text.weights, config.seed, shape, local_rows(shape, sharding), bos)
    batches = train_batches(steps, sharding, start + skipped_batches, config.data.workers)
    held_out, held_out_bytes = held_out_batches(
        text.val, text.weights, config.eval.tokens, text.tokenizer.token_bytes, shape, sharding, bos
    )

    batch = next(batches)
    # Compiled once, here: a compiled program refuses other shapes, so no step can compile anew.
    train_step = built.train_step.lower(state, batch).compile()
    say(
        f"{config.name}: {sum(parameter_counts(config.model).values()):,} parameters, {dtype.name}, on {mesh.size} "
        f"{device.device_kind} device(s); a step: {shape[0]} micro-batch(es) x {shape[1]} rows x {shape[2]} tokens"
        + (f"; continuing after step {start} of {config.steps}" if start else "")
    )

    clock = Clock(facts["seconds"], start)
    flops_share = flops / (peak * mesh.size) if peak else None  # MFU of one token a second
    batch_of = lambda step: step - 1 + skipped_batches
    rows_of = lambda step: {"batch": batch_of(step), "rows": steps.row_numbers(batch_of(step))}
    monitor = Monitor(config, writer, clock, flops_share, rows_of, say, facts["losses"], int(state.skipped_steps))

    generate = make_generate(config.model, dtype, mesh)

    def measure(step: int) -> dict[str, float]:
        """Evaluates and samples the network as it is after `step` steps."""
        results = evaluate(built.eval_step, state.params, held_out, held_out_bytes)
        samples = continuations(
            generate,
            state.params,
            text.tokenizer,
            prompts,
            tokens=config.eval.sample_tokens,
            capacity=config.batch.sequence_length,
            seed=config.seed,
        )
        writer.write({"step": step, "tokens": step * config.batch.tokens_per_step, **results, "samples": samples})
        say(f"step {step}: validation loss {results['val_loss']:.4f}, {results['val_bpb']:.4f} bits per byte")
        return results

    def save(step: int, results: dict[str, float]) -> None:
        kept = {"seconds": clock.seconds, "losses": list(monitor.losses), "next_batch": step + skipped_batches}
        told = {"dataset": text.fingerprint, "config": dataclasses.asdict(config)}
        checkpoints.save(step, state, {**kept, **told, **results})

    def log() -> int:
        """Writes a line. Returns how many saves in a row have failed by now, and tells of them."""
        monitor.write()
        failed_saves = checkpoints.failing(wait=False)
        if failed_saves:
            say(f"{failed_saves} save(s) in a row failed: {checkpoints.failure}; trying again")
        return failed_saves

    if start == 0:
        measure(0)
    step, due, last, failed_saves, results = start, False, start == config.steps, 0, {}
    gc.freeze()  # else a collection within the loop would look through all that was set up: 0.3 s
    clock.start()
    with Stop() as stop:
        while not last:
            state, metrics = train_step(state, batch)
            step += 1
            if due:
                failed_saves = log()  # up to the step before, while this one runs
            with clock.waiting():
                batch = next(batches)
            monitor.add(step, metrics)
            due = step % config.log.every_steps == 0 or step == config.steps
            last = stop.after(step) or step == config.steps
            evaluates = step % config.eval.every_steps == 0 or step == config.steps
            saves = step % config.checkpoint.every_steps == 0 or last or failed_saves > 0
            if due and (evaluates or saves):
                failed_saves = log()  # what a checkpoint vouches for is written before it
                due = False
            elif saves:
                monitor.read()
            rolls_back = config.stability.rollback and monitor.spike and checkpoints.steps()
            gives_up = failed_saves >= config.checkpoint.max_failed_saves
            if monitor.skipped_in_a_row >= config.max_skipped_steps or rolls_back or gives_up:
                break
            results = {}
            if evaluates:
                jax.block_until_ready(state)
                with clock.paused():
                    results = measure(step)
            if saves:
                save(step, results)
                failed_saves = 0
    while last and 0 < checkpoints.failing() < config.checkpoint.max_failed_saves:
        save(step, results)
    failed_saves = checkpoints.failing()
    checkpoints.close()
    seconds = clock.seconds
    monitor.bar.close()
    newest = max(checkpoints.steps(), default=0)
    where = f"the newest checkpoint is of step {newest}" if newest else "no checkpoint was saved"
    if monitor.skipped_in_a_row >= config.max_skipped_steps:
        say(f"stopped at step {step}: --max_skipped_steps={config.max_skipped_steps} in a row were skipped; {where}")
        return FAILED
    if monitor.spike and config.stability.rollback and newest:
        if sum(line["step"] == newest for line in rollbacks) == config.stability.max_rollbacks:
            say(f"stopped at step {step}: {config.stability.max_rollbacks} rollbacks to step {newest} did not help")
            return FAILED
        skips = monitor.spike["step"] - newest
        writer.write({"step": newest, "rollback": {**monitor.spike["spike"], "skipped_batches": skips}})
        say(f"back to step {newest}, and on without the {skips} batch(es) up to that of step {monitor.spike['step']}")
        return ROLLED_BACK
    if failed_saves:
        say(f"stopped at step {step}: {failed_saves} save(s) in a row failed: {checkpoints.failure}; {where}")
        return FAILED
    if step < config.steps:
        say(f"stopped after step {step} of {config.steps}, saved in {run_dir}; the same command continues it")
        return stop.code or 0

    # What came of it.
    digest = params_sha256(state.params)  # gathered from all processes
    if not first_process:
        return 0
    tokens = step * config.batch.tokens_per_step
    skipped = int(state.skipped_steps)
    summary, samples = summarize(run_dir, step, tokens, seconds, skipped_steps=skipped, params_sha256=digest)
    writer.close(options(config), {name: summary[name] for name in ("loss", "val_loss", "val_bpb")})
    plot_loss(run_dir)
    write_summary(run_dir, summary)
    for sample in samples:
        print(f"---\n{sample}")
    print(
        f"---\n{config.name}: {step} steps, {tokens:,} tokens in {seconds:.0f} s of training\n"
        f"training loss {summary['loss']:.4f}, validation loss {summary['val_loss']:.4f}, "
        f"{summary['val_bpb']:.4f} bits per byte\n"
        f"in {run_dir}: loss.png, summary.json, metrics.jsonl, tensorboard/, checkpoints/, tokenizer/\n"
        f"sample:       python sample.py --run_dir={run_dir} --prompt='...'\n"
        f"train longer: the same command with --steps={2 * step} --accept_changes"
    )
    return 0


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    with RunLock(config.run_dir) as lock:
        while (code := train(config, lock, arguments.accept_changes)) == ROLLED_BACK:
            pass
        return code


if __name__ == "__main__":
    run_command(main)
