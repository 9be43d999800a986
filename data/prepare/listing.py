"""The files of a source (local, remote or on the hub): which are taken, left out and held out."""

import errno
import glob
import hashlib
import itertools
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal

import fsspec
from fsspec.utils import glob_translate

from configs.schema import UserError
from data.prepare.corpus import Corpus, ask
from data.prepare.source_files import COMPRESSIONS, TABLE_SUFFIXES, TEXT_SUFFIXES, SourceFile
from data.record import HELD_OUT, name_words

CHAT_STDLIB = "chat-stdlib"
LIBRARY = ("stdlib", CHAT_STDLIB)
SHOWN = 8  # most extensions of files that are left out, in a message

Found = list[tuple[SourceFile, list]]
"""Files, and a version that changes with them."""


def find_corpus(
    source: str,
    text_column: str = "",
    on_error: Literal["stop", "skip"] = "stop",
    separator: str = "",
    text_extensions: str = "",
    revision: str = "",
    conversations: bool = False,
) -> Corpus:
    """Return the files of `source`: `stdlib`, `chat-stdlib`, a file, a folder, a glob (local, or a URL that fsspec
    knows), or `hf:OWNER/NAME[@REVISION][:FOLDER or glob]`, by default of `revision`. A local path that exists is not a
    glob, whatever its letters. Raise UserError if there are no files, and, unless `on_error="skip"`, if one of them or
    a folder cannot be read."""
    extensions = tuple(extension.strip() for extension in text_extensions.split(",") if extension.strip())
    if not all(re.fullmatch(r"\.[^/,]+", extension) for extension in extensions):
        raise UserError(f"--text_extensions={text_extensions} cannot work: write .rst or .rst,.tex")
    library, is_hub = source in LIBRARY, source.startswith("hf:")
    if conversations and source == "stdlib":
        raise UserError(f"the source stdlib is text; {CHAT_STDLIB} is conversations made of it")
    conversations = conversations or source == CHAT_STDLIB
    text_column = text_column or ("messages" if conversations else "text")
    suffixes = (*(() if conversations else TEXT_SUFFIXES), *TABLE_SUFFIXES, *extensions)
    if library:  # others' files cannot be corrected
        suffixes, on_error = (".py",), "skip"
    unread: list[str] = []
    if is_hub:
        listed = _hub_files(source, revision)
    elif "://" in source and not os.path.lexists(source):
        listed = _remote_files(source)
    else:
        listed = _local_files(source, suffixes, on_error, unread)
    if is_hub and any(file.ends_with(*TABLE_SUFFIXES) for file, _ in listed):
        suffixes = (*TABLE_SUFFIXES, *extensions)  # not README.md
    taken = [one for one in listed if one[0].ends_with(*suffixes)]
    files = [file for file, _ in taken]
    described = "" if library else _described([file for file, _ in listed if not file.ends_with(*suffixes)])
    if not files:
        kind, made = ("conversations", CHAT_STDLIB) if conversations else ("text", "stdlib")
        raise UserError(
            f"{source or 'an empty --source'}: {f'no file of {kind}' if listed else 'nothing'} found there{described}; "
            f"give `{made}`, `hf:OWNER/NAME`, or a file, a folder or a glob of {', '.join(suffixes)}"
        )
    version = _version(taken)
    if is_hub:
        commit = files[0].url.partition("@")[2].partition(":")[0]
        version = f"{commit}/{source.removeprefix('hf:').partition(':')[2]}"
    return Corpus(source, files, version, text_column, on_error, separator, described, conversations, tuple(unread))


def hold_out(corpus: Corpus, given: Corpus | None) -> Corpus:
    """Return the corpus with the files first that are held out: `given`'s, and those whose names say so. If the names
    of all files do, none is. UserError for text next to conversations, and for a test split among others: it is for a
    network's last measurement."""
    if given and given.conversations != corpus.conversations:
        raise UserError(
            f"--source={corpus.source} and --val_source={given.source}: one is text, and one conversations; "
            "give --conversations if both are"
        )
    words = lambda file: name_words(file.name) if file.ends_with(".txt", *TABLE_SUFFIXES) else set()
    held_out = {file.url for file in given.files} if given else set()
    files = [file for file in corpus.files if file.url not in held_out]
    named = [file for file in files if words(file) & HELD_OUT]
    tests = [file for file in files if "test" in words(file) and file not in named]
    if len(named) + len(tests) == len(files):
        named, tests = [], []
    if tests:
        raise UserError(
            f"{corpus.source}: {len(tests)} file(s) of a test split, {tests[0].name} the first: they must not be "
            "trained on; give the others by a glob (--source='.../train*'), and any to hold out by --val_source"
        )
    chosen = [replace(file, held_out=True) for file in [*(given.files if given else []), *named]]
    unread = corpus.unread + (given.unread if given else ())
    return replace(corpus, files=[*chosen, *(file for file in files if file not in named)], unread=unread)


def _described(left: list[SourceFile]) -> str:
    """Return a text on the files that are left out, by extension."""
    counts, sizes = Counter(), Counter()
    for file in left:
        suffixes = PurePath(file.name.lower()).suffixes
        extension = "".join(suffixes[-2:] if suffixes[-1:] and suffixes[-1] in COMPRESSIONS else suffixes[-1:])
        counts[extension] += 1
        sizes[extension] += file.size
    described = [
        f"{counts[extension]:,} {extension or 'without an extension'} ({size:,} bytes)"
        for extension, size in sizes.most_common(SHOWN)
    ]
    more = ", and others" * (len(sizes) > SHOWN)
    return f"; left out: {', '.join(described)}{more} (text: --text_extensions)" if described else ""


def _compiled(source: str, pattern: str) -> re.Pattern:
    try:
        return re.compile(glob_translate(pattern))
    except ValueError as error:
        raise UserError(f"{source}: not a glob: {error}") from error


def _local_files(source: str, suffixes: tuple[str, ...], on_error: str, unread: list[str]) -> Found:
    """Return the files of a path, or of a glob below the longest part of it that exists literally. Links to files are
    read; links to folders are not followed. Raise UserError for folders, and files with one of the suffixes, that
    cannot be read; or, with `on_error="skip"`, report them and add the reasons to `unread`."""
    library = source in LIBRARY
    location = sysconfig.get_path("stdlib") if library else os.path.expanduser(source.removeprefix("file://"))
    root, pattern = Path(os.path.abspath(location)), []
    while glob.has_magic(str(root)) and not os.path.lexists(root):
        root, pattern = root.parent, [root.name, *pattern]
    if not location or not os.path.lexists(root):
        return []
    matches = _compiled(source, "/".join(pattern))

    def fail(error: OSError) -> None:
        why = "a link that leads nowhere" if error.errno == errno.ENOENT else str(error.strerror)
        problem = f"{source}: {error.filename} cannot be read: {why}"
        if on_error == "stop":
            raise UserError(f"{problem}; correct that, or skip such files: --on_error=skip")
        _report(problem)
        unread.append(why)

    def paths() -> Iterator[str]:
        if not os.path.isdir(root):
            yield str(root)
            return
        for folder, folders, files in os.walk(root, onerror=fail):
            if library:
                folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages")]
            yield from (os.path.join(folder, name) for name in files)

    listed = []
    for path in paths():
        name = path.removeprefix(str(root)).lstrip("/") or root.name
        if pattern and not matches.match(name):
            continue
        try:
            status = os.stat(path)
            if name.lower().endswith(suffixes) and not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, "no permission to read it", path)
            if os.path.isfile(path):
                listed.append((SourceFile(name, path, status.st_size), [status.st_mtime]))
        except OSError as error:
            if name.lower().endswith(suffixes):
                fail(error)
    return sorted(listed, key=lambda one: one[0].url)


@cache
def _report(problem: str) -> None:
    """Print a problem once, although a source is listed several times."""
    print(problem, file=sys.stderr)


def _remote_files(source: str) -> Found:
    def find() -> tuple[Any, str, dict]:
        filesystem, root = fsspec.core.url_to_fs(source)
        return filesystem, root, (filesystem.glob if glob.has_magic(root) else filesystem.find)(root, detail=True)

    # The scheme's library may be missing, or lack access.
    filesystem, root, paths = ask(source, find, lambda error: f"{source}: cannot be read: {error}")
    root = "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), root.split("/")))
    listed = []
    for path, facts in sorted(paths.items()):
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        if facts.get("type", "file") == "file":
            url, size = filesystem.unstrip_protocol(path), facts.get("size") or 0
            changed = [facts.get(key) for key in ("mtime", "LastModified", "updated", "etag")]
            listed.append((SourceFile(name, url, size, filesystem=filesystem), changed))
    return listed


def _version(listed: Found) -> str:
    """Return a digest of each file's name, size and times of change."""
    facts = (repr((file.name, file.size, changed)) for file, changed in listed)
    return hashlib.sha256("".join(facts).encode()).hexdigest()


def _hub_files(source: str, revision: str) -> Found:
    from huggingface_hub import HfApi  # half a second to import

    repository, _, folder = source.removeprefix("hf:").partition(":")
    repository, _, asked = repository.partition("@")
    facts = ask(
        source,
        lambda: HfApi().dataset_info(repository, revision=asked or revision or None, files_metadata=True),
        lambda error: f"{source}: the hub refuses this dataset: {error}",
    )
    every = sorted(facts.siblings or [], key=lambda file: file.rfilename)
    within = _compiled(source, folder if glob.has_magic(folder) else f"{folder}/**" if folder else "**")
    chosen = [file for file in every if within.match(file.rfilename)]
    if every and not chosen:
        folders = sorted(
            {file.rfilename.rpartition("/")[0] for file in every if file.rfilename.lower().endswith(TABLE_SUFFIXES)}
        )
        raise UserError(f"{source}: the dataset has no folder {folder}; its folders with text: {', '.join(folders)}")
    url = f"hf:{repository}@{facts.sha}:"
    return [(SourceFile(file.rfilename, url + file.rfilename, file.size or 0), []) for file in chosen]
