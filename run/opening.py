"""What a run needs before its programs are compiled: its text, its folder, its checkpoints, and hosts that agree."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from configs.ramp import Ramp
from configs.retry import patiently
from configs.schema import Config
from data.dataset import Text, open_text
from hosts.preflight import preflight
from hosts.runtime import cache_dir, check_hosts_agree, on_first_process
from hosts.watchdog import limited
from interchange.init_from import require_same_network, require_same_vocabulary, why_no_training
from run.checkpoint import Checkpoints, whole_steps
from run.describe import describe_start
from run.folder import STARTS, Past, RunLock, begin, checkpoint_folder, open_run, require_checkpoints
from run.record import Record
from run.resume import open_checkpoints
from training.build import Build


def open_training_text(built: Build, say: Callable[[str], Any]) -> Text:
    """Return the text that the run trains on. UserError if it, or the network in `init_from`, does not fit the run."""
    config, (micro_batches, rows, length) = built.config, built.batch_shape
    if starts_from := _starts_from(config):  # before text is prepared, which can take hours
        require_same_network(config)
    no_training = why_no_training(config) if starts_from else ""
    text = open_text(config.data, config.model.vocab_size, length, micro_batches * rows, cache_dir(), no_training)
    check_hosts_agree("their text", text.fingerprint)
    say(text.outlook(Ramp.of(config.batch).tokens(config.steps) // length, length, config.data.max_epochs))
    say(text.validation(config.eval.tokens, length))
    if text.tokenizer.vocab_size < config.model.vocab_size:
        known = f"{text.tokenizer.vocab_size:,} of --model.vocab_size={config.model.vocab_size:,} tokens"
        say(f"the text's tokenizer has {known}: the others are never seen")
    if starts_from:
        require_same_vocabulary(config, text.tokenizer)
        say(describe_start(config))
    return text


def open_folder(
    built: Build, text: Text, accept_changes: bool, lock: RunLock, record: Record
) -> tuple[Past, Checkpoints]:
    """Claim the run's folder, check the hosts, and return what is known of the run, and its checkpoints. UserError if
    the folder holds another run, or if the hosts cannot train together."""
    config = built.config
    # On one process: an NFS client that looks before the folder is there does not see it for a while.
    on_first_process(lambda: text.tokenizer.require_same_in(Path(config.run_dir) / "tokenizer"))
    past = Past(*on_first_process(lambda: open_run(config, text.fingerprint, accept_changes, lock)))
    # Before the preflight, which makes the folder of checkpoints if it is not there.
    on_first_process(lambda: require_checkpoints(config, past))
    preflight(config, built.mesh, text.fingerprint, text.tokenizer.sha256)  # before anything that needs the devices
    with limited(config.hang, "opening the checkpoints"):
        return past, open_checkpoints(config, record)


def why_nothing_to_do(config: Config, past: Past, checkpoints: Checkpoints) -> str:
    """Return that the run is complete, if it is."""
    if not past.finished == checkpoints.newest == config.steps:
        return ""
    longer = f"--steps={2 * config.steps} --accept_changes"
    return f"{config.run_dir} is complete: {config.steps} steps; a longer run: {longer}"


def why_given_up(config: Config, checkpoints: Checkpoints, record: Record) -> str:
    """Put on record that this start begins. Return why it must not, if too many before it brought no checkpoint."""
    begun = on_first_process(partial(begin, config, checkpoints.newest))
    copy_record(config, record)  # so that a machine without this one's disk counts the same starts
    if begun:
        return ""
    return (
        f"{STARTS} starts in a row brought no checkpoint newer than that of step {checkpoints.newest}: the run is "
        "given up; once its cause is mended, the same command continues it"
    )


def copy_record(config: Config, record: Record) -> None:
    """Copy the run's record to its checkpoints, if these are elsewhere. Every process must call it."""
    on_first_process(lambda: patiently(config.checkpoint.folder, record.copy))


def _starts_from(config: Config) -> bool:
    """Return whether the run takes its network from `init_from`: it has no checkpoint of its own yet."""
    return bool(config.init_from) and not on_first_process(lambda: whole_steps(checkpoint_folder(config)))
