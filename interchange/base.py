"""The network that configs/chat.py fine-tunes, with its tokenizer, or the run that it resumes."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from configs.files import cache_dir, in_bucket, with_retries
from configs.schema import Config, UserError, with_options
from configs.validation import resolved
from data.tokenizer import TextTokenizer, load_tokenizer
from data.tokenizer_formats import find_tokenizer
from interchange.formats import newest_checkpoint
from interchange.init_from import is_run, network_config, tokenizer_in
from run.checkpoint_files import finished_steps
from run.folder import record_of
from run.record import fetch_locally


class Base(NamedTuple):
    """A network to fine-tune on conversations."""

    config: Config
    """A run's config, a config of nanochat's own checkpoint, or one of only the network's options and row."""
    tokenizer: str
    """Folder of the tokenizer, which has these tokens."""
    is_run: bool
    has_rates: bool
    """True if the config has the rates that the network was trained with."""


def base_of_chat(config: Config) -> Base:
    """Return the network in `config.init_from`, with `data.tokenizer` or else its own tokenizer. Raise UserError if
    either is missing, or if the tokenizer lacks the tokens of conversations."""
    folder = fetch_locally(config.init_from)
    base = network_config(folder)
    if not (home := config.data.tokenizer or tokenizer_in(folder)):
        raise UserError(f"{config.init_from} has no tokenizer: give its tokenizer as --data.tokenizer")
    tokenizer = find_tokenizer(home)
    if missing := tokenizer.missing_chat_tokens:
        raise UserError(
            f"the tokenizer of {config.init_from} lacks tokens of conversations ({', '.join(missing)}). Train another "
            "network to start from, with a tokenizer that data.prepare or raw text trains: they reserve these tokens"
        )
    if in_bucket(config.init_from):
        home = kept(tokenizer)
    run = is_run(folder)
    return Base(base, str(home), run, run or newest_checkpoint(folder) is not None)


def resumed_run(config: Config) -> Config | None:
    """Return the options of the run that `config` resumes, and its tokenizer. None if it has no checkpoint, or started
    from another network."""
    config = resolved(config)
    if not with_retries(config.run_dir, lambda: finished_steps(config.run_dir)):
        return None
    resumed = record_of(config.run_dir)[1]
    if resumed.init_from != config.init_from:
        return None
    return with_options(
        resumed, {"data.tokenizer": str(kept(load_tokenizer(fetch_locally(config.run_dir) / "tokenizer")))}
    )


def kept(tokenizer: TextTokenizer) -> Path:
    """Save a tokenizer in the cache, if it is not there, and return its folder."""
    home = cache_dir() / "tokenizers" / tokenizer.sha256[:16]
    if not home.exists():
        made = home.with_name(f"{home.name}.{os.getpid()}")  # several processes of a host may make it
        tokenizer.save(made)
        with suppress(OSError):  # another process has made it
            made.rename(home)
    return home
