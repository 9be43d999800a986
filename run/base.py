"""The config of another run: of the one that configs/chat.py fine-tunes or resumes, or of one that continues by its
folder alone."""

import os
from contextlib import suppress
from pathlib import Path

from data.tokenizer import TextTokenizer, load_tokenizer
from options.schema import Config, with_options
from options.validation import resolved
from run.config_json import config_of_run
from run.folder import folder_to_read
from system.errors import UserError
from system.files import cache_dir


def base_of_chat(config: Config) -> Config:
    """Return the options of the run in `config.init_from`, with `data.tokenizer` of `config`, or else the run's own.
    Raise UserError if there is no run, or if the tokenizer lacks the tokens of conversations."""
    origin = folder_to_read(config.init_from)
    _, base = config_of_run(origin)
    home = Path(config.data.tokenizer or origin.fetched() / "tokenizer")
    tokenizer = load_tokenizer(home)
    if missing := tokenizer.missing_chat_tokens:
        raise UserError(
            f"the tokenizer of {config.init_from} lacks tokens of conversations ({', '.join(missing)}). Train another "
            "network to start from, with a tokenizer that data.prepare or raw text trains: they reserve these tokens"
        )
    if origin.in_bucket:
        home = save_in_cache(tokenizer)
    return with_options(base, {"data.tokenizer": str(home)})


def resumed_run(config: Config) -> Config | None:
    """Return the options of the run that `config` resumes, and its tokenizer. None if it has no checkpoint, or started
    from another network."""
    config = resolved(config)
    folder = folder_to_read(config.run_dir)
    if not folder.retried(folder.finished_steps):
        return None
    resumed = config_of_run(folder)[1]
    if resumed.init_from != config.init_from:
        return None
    tokenizer = load_tokenizer(folder.fetched() / "tokenizer")
    return with_options(resumed, {"data.tokenizer": str(save_in_cache(tokenizer))})


def config_of_continued(run_dir: str) -> Config:
    """Return the config with which a run continues: the recorded one, with the run's own tokenizer if the recorded one
    is gone. Raise UserError if there is no run."""
    folder = folder_to_read(run_dir)
    _, config = config_of_run(folder)
    tokenizer = config.data.tokenizer
    if not tokenizer or tokenizer.startswith("tiktoken:") or Path(tokenizer).exists():
        return config
    home = save_in_cache(load_tokenizer(folder.fetched() / "tokenizer"))
    return with_options(config, {"data.tokenizer": str(home)})


def save_in_cache(tokenizer: TextTokenizer) -> Path:
    """Save a tokenizer in the cache, if it is not there, and return its folder."""
    home = cache_dir() / "tokenizers" / tokenizer.sha256[:16]
    if not home.exists():
        made = home.with_name(f"{home.name}.{os.getpid()}")  # several processes of a host may make it
        tokenizer.save(made)
        with suppress(OSError):  # another process has made it
            made.rename(home)
    return home
