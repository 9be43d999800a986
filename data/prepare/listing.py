"""The files of a source (local or on the hub): which are taken, left out and held out."""

import glob
import hashlib
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Literal

from fsspec.utils import glob_translate

from data.prepare.chat_formats import MESSAGES
from data.prepare.corpus import Corpus, ask, open_source, unreadable
from data.prepare.source_files import CSV_SUFFIXES, ROWS_SUFFIXES, TABLE_SUFFIXES, TEXT_SUFFIXES, SourceFile
from system.errors import UserError
from system.files import is_transient

CHAT_STDLIB = "chat-stdlib"
LIBRARY = ("stdlib", CHAT_STDLIB)
CHAT_SUFFIXES = (".json",)  # one array of conversations
INSTALLED = ("site-packages", "dist-packages")  # folders of a library that are not its own
HELD_OUT = {"validation", "valid", "val", "dev", "eval"}  # names of published splits that are held out
NAMED = 5  # extensions of files that are left out, of which a message names the most frequent ones
COMPARED_BYTES = 2**28  # a source up to this size is compared by content: 0.25 s of one core


def find_corpus(
    source: str | Sequence[str],
    text_column: str = "",
    on_error: Literal["stop", "skip"] = "stop",
    text_extensions: str = "",
    revision: str = "",
    conversations: bool = False,
    exclude: Sequence[str] = (),
) -> Corpus:
    """Return the files of `source`, as `Preparation` describes it and its patterns `exclude`. `revision` is the hub's,
    unless the source has one. A path that exists is not a glob, whatever its letters. Raise UserError if there are no
    files, and if a folder cannot be read."""
    extensions = tuple(f".{one.strip(' .').lower()}" for one in text_extensions.split(",") if one.strip(" ."))
    sources = [source] if isinstance(source, str) else list(source)
    named = " ".join(sources)
    library, is_hub = named in LIBRARY, named.startswith("hf:")
    if len(sources) > 1 and any(one in LIBRARY or one.startswith("hf:") for one in sources):
        raise UserError(f"--source {named}: several sources are files, folders and globs on this machine")
    conversations = conversations or named == CHAT_STDLIB
    if library and extensions:
        raise UserError(f"--text_extensions is for files of your own, and {named} is this Python's library")
    if conversations and extensions:
        raise UserError("--text_extensions is for text, and conversations are .jsonl, .json, .parquet, .csv or .tsv")
    text_column = text_column or (MESSAGES if conversations else "text")
    own = (*(CHAT_SUFFIXES if conversations else TEXT_SUFFIXES), *extensions)
    if library:
        kinds, on_error = [(".py",)], "skip"  # others' files cannot be corrected
    elif is_hub:
        kinds = [ROWS_SUFFIXES, CSV_SUFFIXES, own]  # not README.md
    else:
        kinds = [(*own, *ROWS_SUFFIXES), CSV_SUFFIXES]  # a repository has a .csv that is not its text
    listed: dict[str, SourceFile] = {}  # by URL: sources may overlap
    taken: dict[str, SourceFile] = {}
    excluded: set[str] = set()
    hidden: list[str] = []
    for one in sources:
        found, hidden_here = (_hub_files(one, revision), []) if is_hub else _local_files(one)
        if sources[1:]:
            alone = [PurePath(other).name for other in sources].count(PurePath(one).name) == 1
            name = PurePath(one).name if alone else one.strip("/")
            found = [replace(file, name=f"{name}/{file.name}") for file in found]
        hidden += hidden_here
        if not _readable(found, kinds, extensions):
            kind, made = ("conversations", CHAT_STDLIB) if conversations else ("text", "stdlib")
            known = ", ".join(suffix for suffix in (*own, *TABLE_SUFFIXES) if suffix.count(".") == 1)
            raise UserError(
                f"{one or 'an empty --source'}: {f'no file of {kind}' if found else 'nothing'} found there"
                f"{_described(found, hidden, 0, conversations)}; give `{made}`, `hf:OWNER/NAME`, or a file, a folder "
                f"or a glob of {known} on this machine"
            )
        kept = [file for file in found if not _is_excluded(file, exclude)]
        excluded |= {file.url for file in found} - {file.url for file in kept}
        listed |= {file.url: file for file in kept}
        taken |= {file.url: file for file in _readable(kept, kinds, extensions)}
    left = [file for url, file in listed.items() if url not in taken]
    left_out = "" if library else _described(left, hidden, len(excluded), conversations)
    files = list(taken.values())
    if not files:
        raise UserError(f"{named}: no file is left{left_out}")
    if is_hub:
        commit = files[0].url.partition("@")[2].partition(":")[0]
        version = f"{commit}/{named.removeprefix('hf:').partition(':')[2]}"
    else:
        version = _version(files)
    return Corpus(named, files, version, text_column, on_error, left_out, conversations)


def _readable(
    files: list[SourceFile], kinds: Sequence[tuple[str, ...]], extensions: tuple[str, ...]
) -> list[SourceFile]:
    """Return the files of the first kind of which there is one, and those with extensions that the user gave."""
    for suffixes in kinds:
        if any(file.ends_with(*suffixes) for file in files):
            return [file for file in files if file.ends_with(*suffixes, *extensions)]
    return []


def _is_excluded(file: SourceFile, patterns: Sequence[str]) -> bool:
    names = (file.name, *PurePath(file.name).parts)
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def hold_out(corpus: Corpus) -> Corpus:
    """Return the corpus with the files first that are held out: those of a published split for validation. If all
    files are of such splits, none is. UserError for a test split among others: it is for a network's last
    measurement."""
    split = {file: _split(file, corpus.conversations) for file in corpus.files}
    named = [file for file in corpus.files if split[file] in HELD_OUT]
    tests = [file for file in corpus.files if split[file] == "test"]
    if len(named) + len(tests) == len(corpus.files):
        return corpus
    if tests:
        raise UserError(
            f"{corpus.source}: {len(tests)} file(s) of a test split, {tests[0].name} the first: they must not be "
            "trained on; leave them out: --exclude='[Tt]est*'"
        )
    others = [file for file in corpus.files if file not in named]
    return replace(corpus, files=[*(replace(file, held_out=True) for file in named), *others])


def _split(file: SourceFile, conversations: bool) -> str:
    """Return the word that names a file's split, such as `validation` of validation-00000-of-00002.parquet or of a
    folder `validation`. Code has such names, too: of other files than tables only a .txt directly in the source has
    one."""
    path, tables = PurePath(file.name.lower()), (*TABLE_SUFFIXES, *(CHAT_SUFFIXES if conversations else ()))
    if not file.ends_with(*tables) and (path.suffix != ".txt" or len(path.parts) > 1):
        return ""
    stem = re.fullmatch(r"([a-z]+)([-_.]?[0-9].*)?", path.name.partition(".")[0])
    word = stem[1] if stem else ""
    return word if word in (*HELD_OUT, "test") else path.parent.name


def _described(left: list[SourceFile], hidden: list[str], excluded: int, conversations: bool) -> str:
    """Return a text on what is left out: files by extension, hidden ones, and the number that --exclude names."""
    counts = Counter(PurePath(file.name.lower()).suffix for file in left).most_common()
    parts = [f"{count:,} {extension or 'without an extension'}" for extension, count in counts[:NAMED]]
    if others := counts[NAMED:]:
        parts.append(f"{sum(count for _, count in others):,} of {len(others)} other extensions")
    if counts and not conversations:
        parts[-1] += " (data.prepare and evaluate.py take --text_extensions)"
    if any(file.ends_with(*CSV_SUFFIXES) for file in left):
        parts[-1] += " (a .csv or .tsv is read in a source without other text: --source='DIR/*.csv')"
    if hidden:
        parts.append(f"{len(hidden):,} hidden or linked to nothing ({hidden[0]} ...)")
    if excluded:
        parts.append(f"{excluded:,} by --exclude")
    return f"; left out: {', '.join(parts)}" if parts else ""


def _compiled(source: str, pattern: str) -> re.Pattern:
    try:
        return re.compile(glob_translate(pattern))
    except ValueError as error:
        raise UserError(f"{source}: not a glob: {error}") from error


def _local_files(source: str) -> tuple[list[SourceFile], list[str]]:
    """Return the files of a path, or of a glob below the longest part of it that exists literally, and the names that
    are left out: hidden files and folders, and links that lead nowhere. Raise UserError for a folder that cannot be
    read."""
    location = sysconfig.get_path("stdlib") if source in LIBRARY else os.path.expanduser(source)
    root, pattern = Path(os.path.abspath(location)), []
    while glob.has_magic(str(root)) and not os.path.lexists(root):
        root, pattern = root.parent, [root.name, *pattern]
    if not location or not os.path.lexists(root):
        return [], []
    matches = _compiled(source, "/".join(pattern))
    paths, left_out = _walk(root, INSTALLED if source in LIBRARY else ())
    listed = []
    for path in sorted(paths):
        name = path.removeprefix(str(root)).lstrip("/") or root.name
        if pattern and not matches.match(name):
            continue
        try:
            status = os.stat(path)
        except OSError as error:
            if is_transient(error):  # a text that the disk did not show would be missing from the dataset
                raise
            status = None
        if status and stat.S_ISREG(status.st_mode):
            listed.append(SourceFile(name, path, status.st_size, changed=status.st_mtime))
        else:
            left_out.append(name)
    return listed, left_out


def _walk(root: Path, skipped: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the paths of all files below a folder, or of a single file, and the hidden names that are left out. A
    linked folder is read, unless it was read under another name."""

    def fail(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}")

    if not root.is_dir():
        return [str(root)], []
    paths, hidden, read, tops = [], [], set(), [str(root)]
    for top in tops:
        for folder, folders, files in os.walk(top, onerror=fail):
            if os.path.realpath(folder) in read:
                folders.clear()
                continue
            read.add(os.path.realpath(folder))
            hidden += sorted(name for name in (*folders, *files) if name.startswith("."))
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
            tops += [path for name in folders if os.path.islink(path := os.path.join(folder, name))]
            paths += [os.path.join(folder, name) for name in files if not name.startswith(".")]
    return paths, hidden


def _version(files: list[SourceFile]) -> str:
    """Return a digest of local files: of their names and contents, or above `COMPARED_BYTES` of their names, sizes and
    times of change, which a program may restore. Raise as `Corpus.read` if a file cannot be read."""
    is_small = sum(file.size for file in files) <= COMPARED_BYTES
    facts = [(file.name, _sha256(file) if is_small else (file.size, file.changed)) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _sha256(file: SourceFile) -> str:
    try:
        with open_source(file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(file, error) from error


def _hub_files(source: str, revision: str) -> list[SourceFile]:
    from huggingface_hub import HfApi  # half a second to import

    repository, _, folder = source.removeprefix("hf:").partition(":")
    repository, _, asked = repository.partition("@")
    commit = asked or revision or None
    facts = ask(source, lambda: HfApi().dataset_info(repository, revision=commit, files_metadata=True))
    within = _compiled(source, folder if glob.has_magic(folder) else f"{folder}/**" if folder else "**")
    chosen = [file for file in facts.siblings or [] if within.match(file.rfilename)]
    url = f"hf:{repository}@{facts.sha}:"
    chosen.sort(key=lambda file: file.rfilename)
    return [SourceFile(file.rfilename, url + file.rfilename, file.size or 0) for file in chosen]
