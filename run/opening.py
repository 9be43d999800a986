"""The preparation of a run's first step: its text, its folder, its checkpoints, and hosts that agree."""

import json
from dataclasses import asdict, replace
from functools import partial
from math import ceil
from pathlib import Path

from configs.messages import LOGGER
from configs.ramp import Ramp
from configs.retry import patiently
from configs.schema import Config
from configs.validation import validate
from data.dataset import Text, open_text
from evaluation.evaluator import Evaluator
from hosts.cluster import Cluster
from hosts.preflight import preflight
from hosts.runtime import cache_dir, check_hosts_agree, describe_processes, on_first_process
from hosts.stop import limited
from interchange.growth import describe_growth, require_moments
from interchange.init_from import require_same_network, require_same_vocabulary, why_no_training
from run.checkpoint import Checkpoints, whole_steps
from run.describe import describe_start
from run.folder import STARTS, Past, begin, checkpoint_folder, open_run, require_checkpoints
from run.lock import RunLock
from run.record import Record
from run.resume import open_checkpoints
from training.build import Build, build_stages
from training.mesh import make_mesh


def check_processes(config: Config, cluster: Cluster) -> None:
    """Log the run's processes and devices. Raise UserError if the processes have different configs."""
    LOGGER.info(describe_processes(cluster, make_mesh(config.mesh)))
    check_hosts_agree("their config", json.dumps(asdict(config)))


def open_training(config: Config) -> tuple[list[Build], Text, Evaluator]:
    """Return the builds of the run's stages, with the steps of `epochs` for `steps=0`, the text that it trains on, and
    what evaluates on its held-out part. UserError if the text, or the network in `init_from`, does not fit the run."""
    builds = build_stages(config)
    built = builds[-1]  # for everything that does not depend on the size of a step
    config, (micro_batches, rows, length) = built.config, built.batch_shape
    starts_from = config.init_from and not on_first_process(lambda: whole_steps(checkpoint_folder(config)))
    if starts_from:  # before text is prepared, which can take hours
        require_same_network(config)
        if config.init_optimizer:
            require_moments(config)
    no_training = why_no_training(config) if starts_from else ""
    text = open_text(config.data, config.model.vocab_size, length, micro_batches * rows, cache_dir(), no_training)
    check_hosts_agree("their text", text.fingerprint)
    ramp = Ramp.of(config.batch)
    rows = ramp.tokens(config.steps) // length
    if not config.steps:
        rows = ceil(config.epochs * sum(map(len, text.train)))  # the last step may go beyond them
        steps = ramp.steps_in(rows * length)
        config = replace(config, steps=steps + (ramp.tokens(steps) < rows * length))
        validate(config)
        builds = build_stages(config)
        built = builds[-1]
    LOGGER.info(text.outlook(rows, length, config.data.max_epochs))
    if text.too_long:
        LOGGER.info(text.too_long)
    LOGGER.info(text.validation(config.eval.tokens, length))
    if text.tokenizer.vocab_size < config.model.vocab_size:
        known = f"{text.tokenizer.vocab_size:,} of --model.vocab_size={config.model.vocab_size:,} tokens"
        LOGGER.info(f"the text's tokenizer has {known}: the others are never seen")
    evaluator = Evaluator(built, text)
    if config.eval.tasks:
        check_hosts_agree("their bundle", evaluator.benchmarks.facts["bundle"])
    if starts_from:
        require_same_vocabulary(config, text.tokenizer)
        LOGGER.info("\n".join(filter(None, [describe_start(config), describe_growth(config, text.tokenizer)])))
    return builds, text, evaluator


def open_folder(
    built: Build, text: Text, accept_changes: bool, lock: RunLock, record: Record
) -> tuple[Past, Checkpoints]:
    """Claim the run's folder and check the hosts. Return what is known of the run, and its checkpoints. UserError if
    the folder holds another run, or if the hosts cannot train together."""
    config = built.config
    # On one process: an NFS client that looks too early does not see the folder for a while.
    on_first_process(lambda: text.tokenizer.require_same_in(Path(config.run_dir) / "tokenizer"))
    past = Past(*on_first_process(lambda: open_run(config, text.fingerprint, accept_changes, lock)))
    # Before the preflight, which makes the folder of checkpoints if it is missing.
    on_first_process(lambda: require_checkpoints(config, past))
    preflight(config, built.mesh, text.fingerprint, text.tokenizer.sha256)  # before anything that needs the devices
    with limited(config.hang, "opening the checkpoints"):
        return past, open_checkpoints(config, record)


def why_nothing_to_do(config: Config, past: Past, checkpoints: Checkpoints) -> str:
    """Return a message if the run is complete; empty otherwise."""
    if not past.finished == checkpoints.newest == config.steps:
        return ""
    longer = f"--steps={2 * config.steps} --accept_changes"
    return f"{config.run_dir} is complete: {config.steps} steps; a longer run: {longer}"


def why_given_up(config: Config, newest: int, record: Record) -> str:
    """Record that a process begins after the checkpoint of step `newest`. Return a message if `STARTS` began there in
    vain; empty otherwise."""
    begun = on_first_process(partial(begin, config, newest))
    copy_record(config, record)  # so that a machine without this one's disk counts the same starts
    if begun:
        return ""
    return (
        f"{STARTS} starts in a row brought no checkpoint newer than step {newest}'s: the run is given up; once "
        "its cause is corrected, the same command continues it"
    )


def copy_record(config: Config, record: Record) -> None:
    """Copy the run's record to where its checkpoints are, if that is not the run's folder. Every process must call it,
    for as long as its disk or store needs."""
    on_first_process(lambda: patiently(config.checkpoint.folder, record.copy))
