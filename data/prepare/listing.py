"""The files of a source (local or on the hub): which are taken, left out and held out."""

import glob
import hashlib
import os
import re
import sys
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Literal

from fsspec.utils import glob_translate

from configs.schema import UserError
from data.prepare.corpus import Corpus, ask
from data.prepare.source_files import TABLE_SUFFIXES, TEXT_SUFFIXES, SourceFile
from data.record import HELD_OUT, name_words

CHAT_STDLIB = "chat-stdlib"
LIBRARY = ("stdlib", CHAT_STDLIB)
SHOWN = 8  # most extensions of files that are left out, in a message


def find_corpus(
    source: str,
    text_column: str = "",
    on_error: Literal["stop", "skip"] = "stop",
    text_extensions: str = "",
    revision: str = "",
    conversations: bool = False,
) -> Corpus:
    """Return the files of `source`: `stdlib`, `chat-stdlib`, a file, a folder, a glob, or
    `hf:OWNER/NAME[@REVISION][:FOLDER or glob]`, by default of `revision`. A path that exists is not a glob, whatever
    its letters. Raise UserError if there are no files, and if one of them or a folder cannot be read: with
    `on_error="skip"` it is only reported."""
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
    listed = _hub_files(source, revision) if is_hub else _local_files(source, suffixes, on_error)
    if is_hub and any(file.ends_with(*TABLE_SUFFIXES) for file in listed):
        suffixes = (*TABLE_SUFFIXES, *extensions)  # not README.md
    files = [file for file in listed if file.ends_with(*suffixes)]
    described = "" if library else _described([file for file in listed if not file.ends_with(*suffixes)])
    if not files:
        kind, made = ("conversations", CHAT_STDLIB) if conversations else ("text", "stdlib")
        raise UserError(
            f"{source or 'an empty --source'}: {f'no file of {kind}' if listed else 'nothing'} found there{described}; "
            f"give `{made}`, `hf:OWNER/NAME`, or a file, a folder or a glob of {', '.join(suffixes)} on this machine"
        )
    version = _version(files)
    if is_hub:
        commit = files[0].url.partition("@")[2].partition(":")[0]
        version = f"{commit}/{source.removeprefix('hf:').partition(':')[2]}"
    return Corpus(source, files, version, text_column, on_error, described, conversations)


def hold_out(corpus: Corpus) -> Corpus:
    """Return the corpus with the files first that are held out: those whose names say so. If the names of all files do,
    none is. UserError for a test split among others: it is for a network's last measurement."""
    words = lambda file: name_words(file.name) if file.ends_with(".txt", *TABLE_SUFFIXES) else set()
    named = [file for file in corpus.files if words(file) & HELD_OUT]
    tests = [file for file in corpus.files if "test" in words(file) and file not in named]
    if len(named) + len(tests) == len(corpus.files):
        return corpus
    if tests:
        raise UserError(
            f"{corpus.source}: {len(tests)} file(s) of a test split, {tests[0].name} the first: they must not be "
            "trained on; give the others by a glob (--source='.../train*')"
        )
    others = [file for file in corpus.files if file not in named]
    return replace(corpus, files=[*(replace(file, held_out=True) for file in named), *others])


def _described(left: list[SourceFile]) -> str:
    """Return a text on the files that are left out, by extension."""
    counts = Counter(PurePath(file.name.lower()).suffix for file in left).most_common()
    described = [f"{count:,} {extension or 'without an extension'}" for extension, count in counts[:SHOWN]]
    more = ", and others" * (len(counts) > SHOWN)
    return f"; left out: {', '.join(described)}{more} (text: --text_extensions)" if described else ""


def _compiled(source: str, pattern: str) -> re.Pattern:
    try:
        return re.compile(glob_translate(pattern))
    except ValueError as error:
        raise UserError(f"{source}: not a glob: {error}") from error


def _local_files(source: str, suffixes: tuple[str, ...], on_error: str) -> list[SourceFile]:
    """Return the files of a path, or of a glob below the longest part of it that exists literally. Raise UserError for
    folders, and files with one of the suffixes, that cannot be read; or, with `on_error="skip"`, report them."""
    library = source in LIBRARY
    location = sysconfig.get_path("stdlib") if library else os.path.expanduser(source)
    root, pattern = Path(os.path.abspath(location)), []
    while glob.has_magic(str(root)) and not os.path.lexists(root):
        root, pattern = root.parent, [root.name, *pattern]
    if not location or not os.path.lexists(root):
        return []
    matches = _compiled(source, "/".join(pattern))

    def fail(path: str, why: str | None) -> None:
        problem = f"{source}: {path} cannot be read: {why}"
        if on_error == "stop":
            raise UserError(f"{problem}; correct that, or skip such files: --on_error=skip")
        print(problem, file=sys.stderr)

    paths = [str(root)]
    if root.is_dir():
        paths = []
        for folder, folders, files in os.walk(root, onerror=lambda error: fail(error.filename, error.strerror)):
            if library:
                folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages")]
            paths += [os.path.join(folder, name) for name in files]
    listed = []
    for path in sorted(paths):
        name = path.removeprefix(str(root)).lstrip("/") or root.name
        if pattern and not matches.match(name):
            continue
        if name.lower().endswith(suffixes) and not os.access(path, os.R_OK):
            fail(path, "no permission to read it, or a link that leads nowhere")
        elif os.path.isfile(path):
            status = os.stat(path)
            listed.append(SourceFile(name, path, status.st_size, changed=status.st_mtime))
    return listed


def _version(files: list[SourceFile]) -> str:
    """Return a digest of each file's name, size and time of change."""
    facts = (repr((file.name, file.size, [file.changed])) for file in files)
    return hashlib.sha256("".join(facts).encode()).hexdigest()


def _hub_files(source: str, revision: str) -> list[SourceFile]:
    from huggingface_hub import HfApi  # half a second to import

    repository, _, folder = source.removeprefix("hf:").partition(":")
    repository, _, asked = repository.partition("@")
    facts = ask(
        source,
        lambda: HfApi().dataset_info(repository, revision=asked or revision or None, files_metadata=True),
        lambda error: f"{source}: the hub refuses this dataset: {error}",
    )
    within = _compiled(source, folder if glob.has_magic(folder) else f"{folder}/**" if folder else "**")
    chosen = [file for file in facts.siblings or [] if within.match(file.rfilename)]
    url = f"hf:{repository}@{facts.sha}:"
    chosen.sort(key=lambda file: file.rfilename)
    return [SourceFile(file.rfilename, url + file.rfilename, file.size or 0) for file in chosen]
