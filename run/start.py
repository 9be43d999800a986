"""The start of a run, before its first step: the text, the folder, the checkpoints, the hosts, the first state."""

import json
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from configs.schema import Config, free_to_change, options
from configs.validation import validate
from data.dataset import Text, open_text
from data.loader import StepBatches, local_rows
from evaluation.evaluator import encode_prompts
from hosts.distributed import check_hosts_agree, on_every_process, on_first_process
from hosts.preflight import require_room
from hosts.runtime import code_digest, describe_processes, versions
from hosts.watchdog import io_limit
from model.gpt import parameter_counts
from model.kernels import attention_kernel, described, window_of
from model.parallel import compute_capability
from run.checkpoint_files import finished_steps
from run.folder import RunStatus, open_run, require_checkpoints, take_over, write_start_record, writing_to
from run.init_from import (
    initial_state,
    require_moments,
    require_same_network,
    require_same_vocabulary,
    why_no_new_tokenizer,
)
from run.record import Events, Times, batch_of, local_path
from run.saver import Saver
from system.errors import UserError
from system.files import cache_dir, with_retries
from system.messages import LOGGER
from training.build import Build, build
from training.mesh import make_mesh, sizes_of
from training.state import TrainState


class ResumePoint(NamedTuple):
    """Where a start begins: before step 0, or after a checkpoint."""

    state: TrainState
    step: int = 0
    """Steps taken."""
    tokens: int = 0
    """Tokens of those steps, which are the data's position."""
    seconds: float = 0.0
    """Seconds of training."""
    losses: tuple[float, ...] = ()
    """Losses of the newest steps, to compare a spike with."""


def check_processes(config: Config, arguments: Any) -> None:
    """Log the run's processes and devices. Raise UserError if the processes have different options, the command's own
    (`arguments`, a dataclass) included."""
    check_hosts_agree("their options", json.dumps([asdict(config), asdict(arguments)]))
    LOGGER.info(describe_processes(make_mesh(config.mesh)))


def build_and_open_text(config: Config) -> tuple[Build, Text]:
    """Return the run's build, with the steps of `epochs` for `steps=0`, and the text that it trains on. Raise UserError
    if the text, the prompts, or the network in `init_from` do not fit the run."""
    built = build(config)
    config, (micro_batches, rows, length) = built.config, built.batch_shape
    starts_from = begins_from_another(config)

    def opened() -> Text:
        if starts_from:  # before text is prepared, which can take hours
            require_same_network(config)
            if config.init_optimizer:
                require_moments(config)
        no_new_tokenizer = why_no_new_tokenizer(config) if starts_from else ""
        size = config.model.vocab_size
        text = open_text(config.data, size, length, micro_batches * rows, cache_dir(), no_new_tokenizer)
        encode_prompts(text.tokenizer, config.eval.prompts, length)  # a mistake, before any compute
        if starts_from:
            require_same_vocabulary(config, text.tokenizer)
        return text

    text = on_every_process("their text", opened)
    check_hosts_agree("their text", text.fingerprint)
    if not config.steps:
        config = replace(config, steps=text.steps(config.epochs, micro_batches * rows))
        validate(config)
        built = build(config)
    if text.too_long:
        LOGGER.info(text.too_long)
    LOGGER.info(text.validation_message(config.eval.tokens, length))
    if text.tokenizer.vocab_size < config.model.vocab_size:
        known = f"{text.tokenizer.vocab_size:,} of --model.vocab_size={config.model.vocab_size:,} tokens"
        LOGGER.info(f"the text's tokenizer has {known}: the others are never seen")
    if starts_from:
        LOGGER.info(f"starting from the network in {config.init_from}")
    return built, text


def begins_from_another(config: Config) -> bool:
    """Return whether the run has no checkpoint yet, and begins from the network in `init_from`. Every process must call
    it."""
    steps_here = partial(with_retries, config.run_dir, lambda: finished_steps(config.run_dir))
    return config.init_from != "" and not on_first_process(steps_here)


def claim_folder(config: Config, text: Text, accept_changes: bool) -> RunStatus:
    """Claim the run's folder for this config and text. Return what is known of the run. Raise UserError if the folder
    does not fit them, TrainingAborted if the disk has no room for a checkpoint."""
    # On one process: an NFS client that looks too early does not see the folder for a while.
    claim = partial(open_run, config, text.fingerprint, accept_changes)
    status = RunStatus(*on_first_process(partial(writing_to, config.run_dir, claim)))
    if status.has_steps:
        # After all options that differ are listed: another tokenizer follows from some of them.
        on_first_process(lambda: text.tokenizer.require_same_in(local_path(config.run_dir) / "tokenizer"))
    find_checkpoints = partial(require_checkpoints, config, status.saved)
    on_first_process(partial(with_retries, config.run_dir, find_checkpoints))
    if status.finished < config.steps:
        require_room(config)
    return status


def open_checkpoints(config: Config, text: Text, resume_step: int | None) -> Saver:
    """Delete what a kill left half written, and return the run's complete checkpoints, back at `resume_step`. Raise
    UserError if they have more steps than the run should have."""
    with io_limit(config.hang, "opening the checkpoints"):
        on_first_process(partial(writing_to, config.run_dir, partial(take_over, config.run_dir)))
        checkpoints = Saver(config.run_dir, config.checkpoint)
        if resume_step is not None:
            go_back_to(resume_step, config, checkpoints)
    if checkpoints.newest > config.steps:
        raise UserError(f"--steps={config.steps}, but {config.run_dir} has come to step {checkpoints.newest} already")
    length, size = config.batch.sequence_length, config.batch.tokens_per_step
    before, _ = on_first_process(lambda: batch_of(Events(config.run_dir).read(), checkpoints.newest, size))
    LOGGER.info(text.outlook_message((before + (config.steps - checkpoints.newest) * size) // length, length))
    return checkpoints


def go_back_to(step: int, config: Config, checkpoints: Saver) -> None:
    """Set aside the checkpoints newer than `step`'s, and record it. Do nothing if the same command did so before: with
    the same options the run would take the same course. Raise UserError if there is no such checkpoint."""
    events = Events(config.run_dir)
    deciding = {name: value for name, value in options(config).items() if not free_to_change(name)}
    asked = {"step": step, "options_sha256": sha256(json.dumps(deciding).encode()).hexdigest()}
    went_back = on_first_process(lambda: [event for event in events.read() if event["event"] == "went_back"])
    if went_back and {name: went_back[-1][name] for name in asked} == asked:
        LOGGER.info(f"--resume_step={step}: the run went back there in an earlier start, and continues")
        return
    if step not in checkpoints.steps:
        there = ", ".join(map(str, checkpoints.steps)) or "none"
        raise UserError(f"--resume_step={step}: {config.run_dir} has no such checkpoint; it has {there}")
    checkpoints.set_aside_after(step)
    on_first_process(lambda: events.add("went_back", **asked))


def batches_after(resume_point: ResumePoint, built: Build, text: Text) -> StepBatches:
    """Return the batches of the steps after it."""
    config, shape = built.config, built.batch_shape
    row = resume_point.tokens // config.batch.sequence_length
    mine = local_rows(shape, built.batch_sharding)
    return StepBatches(text.train, text.mixture, config.seed, shape, mine, text.document_bos, row)


def resume(built: Build, checkpoints: Saver, times: Times) -> ResumePoint | None:
    """Return the state and the data's position of the newest checkpoint that can be read; None without any."""
    with times.during("restore"), io_limit(built.config.hang, "restoring"):
        restored = checkpoints.restore_newest(built.abstract_state)
    if restored is None:
        return None
    state, facts = restored
    LOGGER.info(f"continuing after step {facts['step']} of {built.config.steps}")
    return ResumePoint(state, facts["step"], facts["tokens"], facts["seconds"], tuple(facts["losses"]))


def begin(built: Build) -> ResumePoint:
    """Return the state before step 0."""
    with io_limit(built.config.hang, "making the first state"):
        return ResumePoint(jax.block_until_ready(initial_state(built)))


def made_with(mesh: Mesh) -> dict[str, Any]:
    """Return the facts of a start for its event: the code's hash, versions, devices, mesh."""
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {jax.process_count()} process(es)"
    return {"code_hash": code_digest(), "versions": versions(), "devices": devices, "mesh": sizes_of(mesh)}


def record_start(built: Build, text: Text, changes: list[str], resume_point: ResumePoint) -> None:
    """Record that the run continues from this point, the changed options, and its tokenizer."""
    config = built.config
    facts = made_with(built.mesh) | {"parameters": sum(parameter_counts(config.model).values())}
    point = resume_point.step, resume_point.tokens

    def write() -> None:
        write_start_record(config, text.fingerprint, changes, *point, **facts)
        text.tokenizer.save(local_path(config.run_dir) / "tokenizer")

    on_first_process(write)


def describe(built: Build) -> str:
    """Return lines for the run, the sizes of its step, and its kernel of attention."""
    config, (micro_batches, rows, length) = built.config, built.batch_shape
    return (
        f"{config.name}: {sum(parameter_counts(config.model).values()):,} parameters, {built.dtype.name}, on "
        f"{built.mesh.size} {built.mesh.devices.flat[0].device_kind} device(s); {config.steps:,} steps; a "
        f"step: {micro_batches} micro-batch(es) x {rows} rows x {length} tokens\n"
        f"{describe_attention(built)}"
    )


def describe_attention(built: Build) -> str:
    """Return the kernel that computes attention and, if some blocks have windows, which ones, in a line."""
    config, length, head_dim = built.config, built.batch_shape[2], built.config.model.head_dim
    device, documents = built.mesh.devices.flat[0], config.data.mask_documents
    of_rows = (built.dtype.name, length, head_dim, documents)
    kernel = attention_kernel(device.platform, compute_capability(), *of_rows)
    windows = "".join("S" if window_of(config.model, layer) else "L" for layer in range(config.model.depth))
    suffix = f"; window of each block: {windows} (S short, L long)" * ("S" in windows)
    return f"attention: {described(kernel, length, head_dim)}{suffix}"
