"""Networks on the Hugging Face hub: the files that a conversion reads come down, and an export goes up.

The client is huggingface-hub: it takes the token from HF_TOKEN or `hf auth login`, resumes a file that was cut, keeps
files in its cache, and asks nothing with HF_HUB_OFFLINE=1. It is imported where it is needed, as that takes half a
second.
"""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from interchange.nanochat import meta_file, newest_model
from system.errors import StorageLost, UserError
from system.files import first_line, status_of, with_retries

T = TypeVar("T")
PATTERNS = ["*.safetensors", "model_*.pt", "meta_*.json", "config.json", "*chat_template*"]
PATTERNS += ["tokenizer.json", "tokenizer.pkl", "tokenizer/tokenizer.pkl"]
"""The files that a conversion reads, of networks of every format."""


def download(address: str) -> Path:
    """Return the folder of the client's cache with the files of `hf:OWNER/NAME[@REVISION]` that a conversion reads, and
    fetch what is missing. Raise UserError if the hub has no such network or refuses, and StorageLost if it does not
    answer."""
    from huggingface_hub import HfApi, constants, snapshot_download

    repository, _, revision = address.removeprefix("hf:").partition("@")
    names = PATTERNS
    if not constants.is_offline_mode():
        found = ask(address, lambda: HfApi().list_repo_files(repository, revision=revision or None))
        names = needed(found)
        if not any(name.endswith((".pt", ".safetensors")) for name in names):
            raise UserError(f"{address} holds no network at its top: no *.safetensors or model_NNNNNN.pt")
    return Path(ask(address, lambda: snapshot_download(repository, revision=revision or None, allow_patterns=names)))


def needed(names: Collection[str]) -> list[str]:
    """Return those of a repository's files that a conversion reads: of nanochat's own checkpoints only the newest, of
    which the optimizer's files are left out."""
    if newest := newest_model(names):
        wanted = {newest, meta_file(Path(newest)).name, "tokenizer.pkl", "tokenizer/tokenizer.pkl"}
        return sorted(wanted & set(names))
    whole = {"config.json", "tokenizer.json"}
    return sorted(
        name for name in names if name in whole or re.fullmatch(r"[^/]*(\.safetensors|chat_template.*)", name)
    )


def require_room(repository: str, revision: str, overwrite: bool) -> None:
    """Raise UserError if a network cannot be pushed there: without a token, or if the revision (empty: main) has files
    that `overwrite` does not give up. It writes nothing."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    def files() -> list[str]:
        try:
            return HfApi().list_repo_files(repository, revision=revision or None)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return []

    if not get_token():
        raise UserError("--push needs a token that may write: set HF_TOKEN, or run hf auth login")
    there = [name for name in ask(repository, files) if name != ".gitattributes"]
    if there and not overwrite:
        raise UserError(
            f"{repository} has {len(there)} files at {revision or 'main'} ({', '.join(there[:3])}, ...): give "
            "--revision=BRANCH for a new branch, or --overwrite to replace them"
        )


def push(folder: Path, repository: str, revision: str) -> str:
    """Make the files of a folder those of a repository's revision (empty: main), in one commit, and return its address.
    A new repository is private. Raise UserError if the hub refuses, and StorageLost if it does not answer."""
    from huggingface_hub import HfApi

    hub = HfApi()

    def upload() -> str:
        hub.create_repo(repository, private=True, exist_ok=True)
        if revision:
            hub.create_branch(repository, branch=revision, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision or None,
            delete_patterns="*",
            commit_message="Export of tokensum",
        )
        return commit.commit_url

    return ask(repository, upload)


def ask(what: str, function: Callable[[], T]) -> T:
    """Return the hub's answer. Raise StorageLost if it does not answer, and UserError if it refuses, or if the token
    has letters that no header may have: an error of the client would show it."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError

    if not re.fullmatch("[!-~]*", get_token() or ""):
        raise UserError("the token in HF_TOKEN, or of hf auth login, has a letter that no token has: set it again")

    def ask_once() -> T:
        try:
            return function()
        except HfHubHTTPError as error:
            if status_of(error) not in (401, 403, 404):
                raise
            raise UserError(
                f"{what}: the hub has no such repository or revision, or this token may not do that: check the name, "
                f"and set HF_TOKEN or run hf auth login ({first_line(error)})"
            ) from None  # a status in its causes would have it tried again

    try:
        return with_retries(what, ask_once)
    except (UserError, StorageLost):
        raise
    except Exception as error:
        raise UserError(f"{what}: the hub refuses this: {first_line(error)}") from error
