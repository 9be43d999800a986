"""Documents: where the text comes from, read one after the other, and which of them are held out."""

import codecs
import glob
import hashlib
import io
import itertools
import json
import lzma
import mimetypes
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import fsspec
import pyarrow
import pyarrow.json
from fsspec.utils import glob_translate

from configs.retry import StorageLost, patiently
from configs.schema import UserError
from data.prepare.remote import open_remote
from data.prepare.source_files import (
    COMPRESSIONS,
    LINE_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    SourceFile,
    chunks,
    lines,
    lines_before,
    rows,
    separated,
    values,
)

CUT_BYTES = 2**20  # of a text, above which it is cut into documents
HELD_OUT = {"validation", "valid", "val", "dev", "eval"}  # words in names of files that publishers hold out
NO_TEXT, SHOWN = "no text", 8
BINARY = (".bin", ".npy", ".npz", ".pt", ".safetensors", ".pyc", ".so", ".o")
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
PRINTED = (".pdf", ".docx", ".odt", ".epub")
LONG = 2**24  # bytes of a document, above which it is not held as characters: with one emoji each takes 4 bytes


@dataclass(frozen=True)
class Document:
    """A text, and a name that stays the same on every machine."""

    name: str
    text: str
    problem: str = ""
    """Why there is no text, and the document is skipped."""


@dataclass(frozen=True)
class Corpus:
    """The files of a source, in the order of their names."""

    source: str
    files: list[SourceFile]
    version: str
    """Differs when a file does: the hub's revision, or a digest of names, sizes and times of change."""
    text_column: str = "text"
    on_error: Literal["stop", "skip"] = "stop"
    separator: str = ""
    """What stands between documents of a text."""
    left_out: str = ""
    """Files of other kinds, by extension, and what to do about them."""
    is_minor: bool = False
    """Whether those have more bytes than the files."""

    def documents(self, file: SourceFile) -> Iterator[Document]:
        """The file's documents, one by one. One that is empty or cannot be read is a UserError, or, with
        `on_error="skip"`, a document with a problem. UserError where the file is damaged."""
        for number, text, problem in self.read(file):
            if text or problem:
                yield Document(self.name(file, number), text if isinstance(text, str) else text.decode(), problem)

    def read(self, file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, str | bytes, str]]:
        """Number, text (a long one in UTF-8) and problem of each document of a span of the file, and of each empty
        line, which has neither. Raises as `documents` does."""
        if file.problem:
            yield 1, "", file.problem
            return
        try:
            for number, content in self.contents(file, start, stop):
                if not content and self.is_lines(file):
                    yield number, "", ""
                    continue
                text, problem = _text_of(file, content, self.text_column)
                if problem and self.on_error == "stop":
                    first = self.numbers_before(file, start)
                    raise UserError(
                        f"{self.source}: {self.name(file, first + number)}: {problem}; mend it, or count and skip "
                        "such: --on_error=skip"
                    )
                yield number, text, problem
        except (OSError, EOFError, lzma.LZMAError, pyarrow.ArrowException) as error:
            raise UserError(f"{file.url}: cannot be read to its end: {error}") from error

    def name(self, file: SourceFile, number: int) -> str:
        """The name of the document of this number, from 1, of a file."""
        if file.problem or not (file.name.endswith(TABLE_SUFFIXES) or self._is_cut(file)):
            return file.name
        if self._is_cut(file):
            return f"{file.name}#{number - 1:08d}"
        return f"{file.name} {'line' if self.is_lines(file) else 'row'} {number}"

    def numbers_before(self, file: SourceFile, start: int) -> int:
        """What is to be added to a document's number in a span that begins at `start`."""
        is_separated = bool(self.separator) and self._is_cut(file)
        if not start or not (is_separated or file.name.endswith(".jsonl")):
            return 0
        with _opened(file) as opened:
            if is_separated:
                return sum(1 for _ in separated(opened, self.separator.encode(), 0, start))
            return lines_before(opened, start)

    def is_lines(self, file: SourceFile) -> bool:
        """Whether each line is a record of JSON."""
        return file.name.endswith(LINE_SUFFIXES)

    def is_divisible(self, file: SourceFile) -> bool:
        """Whether a span of the file can be read without what lies before."""
        overlaps = any(self.separator.startswith(self.separator[i:]) for i in range(1, len(self.separator)))
        is_cut = self._is_cut(file) and "://" not in file.url and not overlaps
        return file.name.endswith((".jsonl", ".parquet")) or is_cut

    def _is_cut(self, file: SourceFile) -> bool:
        is_text = not (file.problem or file.name.endswith(TABLE_SUFFIXES))
        return is_text and (bool(self.separator) or len(self.files) == 1 or file.size > CUT_BYTES)

    def contents(self, file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Number and raw content of each document."""
        with _opened(file) as opened:
            if file.name.endswith(".parquet"):
                yield from rows(file, opened, self.text_column, start, stop)
            elif self.is_lines(file):
                yield from lines(file, opened, start, stop)
            elif file.name.endswith(TABLE_SUFFIXES):
                yield from values(file, opened, self.text_column)
            elif self.separator:
                yield from separated(opened, self.separator.encode(), start, stop)
            elif self._is_cut(file):
                yield from chunks(opened, start, stop)
            else:
                yield 1, opened.read()


def find_corpus(
    source: str,
    text_column: str = "text",
    on_error: Literal["stop", "skip"] = "stop",
    separator: str = "",
    text_extensions: str = "",
    revision: str = "",
) -> Corpus:
    """Return the files of `source`: `stdlib`, a file, a folder, a glob (local, or a URL that fsspec knows), or
    `hf:OWNER/NAME[@REVISION][:FOLDER or glob]`, by default of `revision`. A local path that exists is no glob, whatever
    its letters. UserError where there are no files, and, unless `on_error="skip"`, where one of them or a folder cannot
    be read."""
    extensions = tuple(extension.strip() for extension in text_extensions.split(",") if extension.strip())
    if not all(re.fullmatch(r"\.[^/,]+", extension) for extension in extensions):
        raise UserError(f"--text_extensions={text_extensions} cannot work: write .rst or .rst,.tex")
    suffixes = (*TEXT_SUFFIXES, *TABLE_SUFFIXES, *extensions)
    if source == "stdlib":  # what others wrote cannot be mended
        suffixes, on_error = (".py",), "skip"
    if source.startswith("hf:"):
        found = _hub_files(source, revision)
    elif "://" in source and not os.path.lexists(source):
        found = _remote_files(source)
    else:
        found = _local_files(source, suffixes)
    taken = [one for one in found if one[0].name.endswith(suffixes) or one[0].problem]
    if source.startswith("hf:") and any(one[0].name.endswith(TABLE_SUFFIXES) for one in taken):
        taken = [one for one in taken if one[0].name.endswith((*TABLE_SUFFIXES, *extensions))]  # not README.md
    files = [file for file, _ in taken]
    known = {file.url for file in files}
    left = [file for file, _ in found if file.url not in known and source != "stdlib"]
    if not files:
        raise UserError(
            f"{source or 'an empty --source'}: no file of text found there{_described(left)}; give `stdlib`, "
            f"`hf:OWNER/NAME`, or a file, a folder or a glob of {', '.join(TEXT_SUFFIXES + TABLE_SUFFIXES)}"
        )
    if (broken := [file for file in files if file.problem]) and on_error == "stop":
        raise UserError(
            f"{source}: {len(broken)} file(s) or folder(s) cannot be read, {broken[0].url} the first: "
            f"{broken[0].problem}; mend that, or count and skip such: --on_error=skip"
        )
    minor = [file for file in left if file.name.find("/.") < 0 and _advice(_extension(file.name)) not in ("", NO_TEXT)]
    is_minor = "://" not in files[0].url and not source.startswith("hf:") and _size(minor) > _size(files)
    commit = files[0].url.partition("@")[2].partition(":")[0] if source.startswith("hf:") else ""
    version = f"{commit}/{source.removeprefix('hf:').partition(':')[2]}" if commit else _version(taken)
    return Corpus(source, files, version, text_column, on_error, separator, _described(left), is_minor)


def name_words(name: str) -> set[str]:
    """Return the words of a file's name, by which splits are told apart."""
    return set(re.split("[^a-z]+", name.lower()))


def hold_out(corpus: Corpus, given: Corpus | None) -> Corpus:
    """Return the corpus with the files first that are held out: `given`'s, and those whose names say so. If the names
    of all files do, none is. UserError for a test split among others: it is for a network's last measurement."""
    words = lambda file: name_words(file.name) if file.name.endswith((".txt", *TABLE_SUFFIXES)) else set()
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
    return replace(corpus, files=[*chosen, *(file for file in files if file not in named)])


def _size(files: list[SourceFile]) -> int:
    return sum(file.size for file in files)


def _described(left: list[SourceFile]) -> str:
    """Files that are left out, by extension, and what to do to have them."""
    counts, sizes = Counter(), Counter()
    for file in left:
        counts[extension := _extension(file.name)] += 1
        sizes[extension] += file.size
    said = [
        f"{counts[extension]:,} {extension or 'without an extension'} ({size:,} bytes"
        + f"; {_advice(extension)}" * bool(_advice(extension))
        + ")"
        for extension, size in sizes.most_common(SHOWN)
    ]
    return f"; left out: {', '.join(said)}{', and others' * (len(sizes) > SHOWN)}" if said else ""


def _extension(name: str) -> str:
    suffixes = PurePath(name).suffixes
    return "".join(suffixes[-2:] if name.endswith(tuple(COMPRESSIONS)) else suffixes[-1:])


def _advice(extension: str) -> str:
    """What a person does with files of an extension that are to be read."""
    kind = (mimetypes.guess_type(f"x{extension}")[0] or "").split("/")[0]
    if kind in ("image", "audio", "video", "font") or extension in BINARY:
        return NO_TEXT
    if extension.endswith((*COMPRESSIONS, *ARCHIVES)):
        return "unpack them"
    if extension in PRINTED:
        return "extract their text"
    return "lines of JSON? call them .jsonl" if extension == ".json" else extension and f"--text_extensions={extension}"


def hash_share(text: str) -> float:
    """Return a number in [0, 1) from a text. A document is held out if it is below the fraction to hold out: so equal
    texts share a side in every dataset, whatever else is in it."""
    content = text.encode(errors="surrogateescape")  # a file's name may be any bytes
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


Found = list[tuple[SourceFile, list]]
"""Files, and what differs when they change."""


def _local_files(source: str, suffixes: tuple[str, ...]) -> Found:
    """A path, or a glob below the longest part of it that exists as it is written."""
    library = source == "stdlib"
    location = sysconfig.get_path("stdlib") if library else os.path.expanduser(source.removeprefix("file://"))
    root, pattern = Path(os.path.abspath(location)), []
    while glob.has_magic(str(root)) and not os.path.lexists(root):
        root, pattern = root.parent, [root.name, *pattern]
    if not location or not os.path.lexists(root):
        return []
    try:
        whole, steps = re.compile(glob_translate("/".join(pattern))), [re.compile(glob_translate(p)) for p in pattern]
    except ValueError as error:
        raise UserError(f"{source}: not a glob: {error}") from error
    fixed = pattern.index("**") if "**" in pattern else len(pattern)  # each of these steps is one folder's name

    def enters(folder: str) -> bool:
        names = folder.split("/")
        if library:
            return names[-1] not in ("site-packages", "dist-packages")
        far_enough = bool(pattern) and fixed == len(pattern) <= len(names)
        return not far_enough and all(step.match(name) for step, name in zip(steps[:fixed], names))

    takes = lambda name: not pattern or whole.match(name) is not None
    # What links in a system's library lead to is not of the library.
    found = _walk(str(root), takes, suffixes, enters, len(pattern), links=not library)
    return sorted(found, key=lambda one: one[0].url)


def _walk(
    root: str,
    takes: Callable[[str], bool],
    suffixes: tuple[str, ...],
    enters: Callable[[str], bool],
    tail: int,
    links: bool,
) -> Iterator[tuple[SourceFile, list]]:
    """The files below `root` whose names below it `takes` accepts, in folders that `enters` accepts, and when they
    changed; what cannot be read, if it ends with one of `suffixes` or may be a folder.

    Each is read once: under its own name, else under the first of those that links give it. So is a folder,
    for each of its names' last `tail` parts: what a glob finds in it depends on them."""
    files, folders, linked = set(), set(), [(root, os.path.realpath(root))]
    while linked:
        waiting, linked = sorted(linked, reverse=True), []
        while waiting:
            path, real = waiting.pop()
            name, is_folder = path.removeprefix(root).lstrip("/") or os.path.basename(root), False
            try:
                status = os.stat(real)
                is_folder = stat.S_ISDIR(status.st_mode)
                key = (real, *(name.split("/")[-tail:] if tail else ()))
                if is_folder and key not in folders and (path == root or enters(name)):
                    folders.add(key)
                    with os.scandir(real) as entries:
                        for entry in entries:
                            below = os.path.join(path, entry.name)
                            if not entry.is_symlink():
                                waiting.append((below, os.path.join(real, entry.name)))
                            elif links:
                                linked.append((below, os.path.realpath(entry.path)))
                elif stat.S_ISREG(status.st_mode) and takes(name) and real not in files:
                    files.add(real)
                    problem = "" if os.access(real, os.R_OK) else "no permission to read it"
                    problem = problem if name.endswith(suffixes) else ""
                    yield SourceFile(name, path, status.st_size, problem), [status.st_mtime, None, None, None]
            except OSError as error:
                if (
                    is_folder or (takes(name) and name.endswith(suffixes)) or not PurePath(name).suffix
                ):  # a link of such a name may lead to a folder
                    problem = error.strerror if os.path.lexists(real) else "a link that leads nowhere"
                    yield SourceFile(name, path, 0, problem or "it cannot be read"), [None] * 4


def _remote_files(source: str) -> Found:
    def find() -> tuple[Any, str, dict]:
        filesystem, root = fsspec.core.url_to_fs(source)
        return filesystem, root, (filesystem.glob if glob.has_magic(root) else filesystem.find)(root, detail=True)

    # The scheme's library may be missing, or have no access.
    filesystem, root, paths = _asked(source, find, lambda error: f"{source}: cannot be read: {error}")
    root = "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), root.split("/")))
    found = []
    for path, facts in sorted(paths.items()):
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        if facts.get("type", "file") == "file":
            url, size = filesystem.unstrip_protocol(path), facts.get("size") or 0
            changed = [facts.get(key) for key in ("mtime", "LastModified", "updated", "etag")]
            found.append((SourceFile(name, url, size, filesystem=filesystem), changed))
    return found


def _version(found: Found) -> str:
    """A digest of each file's name, size and times of change."""
    facts = (repr((file.name, file.size, changed)) for file, changed in found)
    return hashlib.sha256("".join(facts).encode()).hexdigest()


def _hub_files(source: str, revision: str) -> Found:
    from huggingface_hub import HfApi  # half a second to import

    repository, _, folder = source.removeprefix("hf:").partition(":")
    repository, _, asked = repository.partition("@")
    facts = _asked(
        source,
        lambda: HfApi().dataset_info(repository, revision=asked or revision or None, files_metadata=True),
        lambda error: f"{source}: the hub does not give this dataset: {error}",
    )
    every = sorted(facts.siblings or [], key=lambda file: file.rfilename)
    try:
        is_within = re.compile(glob_translate(folder)).match if glob.has_magic(folder) else None
    except ValueError as error:
        raise UserError(f"{source}: not a glob: {error}") from error
    is_within = is_within or (lambda name: name.startswith(f"{folder}/" if folder else ""))
    chosen = [file for file in every if is_within(file.rfilename)]
    if every and not chosen:
        folders = sorted(
            {file.rfilename.rpartition("/")[0] for file in every if file.rfilename.endswith(TABLE_SUFFIXES)}
        )
        raise UserError(f"{source}: the dataset has no folder {folder}; its folders with text: {', '.join(folders)}")
    url = f"hf:{repository}@{facts.sha}:"
    return [(SourceFile(file.rfilename, url + file.rfilename, file.size or 0), []) for file in chosen]


def _opened(file: SourceFile) -> io.BufferedReader:
    """Open a file of this machine, of a URL, or of the hub, which is downloaded from where a download stopped."""
    if "://" in file.url:
        return open_remote(file.filesystem, file.url)
    return open(_downloaded(file.url) if file.url.startswith("hf:") else file.url, "rb")


def _downloaded(url: str) -> str:
    from huggingface_hub import hf_hub_download

    repository, _, rest = url.removeprefix("hf:").partition("@")
    revision, _, name = rest.partition(":")
    return _asked(
        url,
        lambda: hf_hub_download(repository, name, repo_type="dataset", revision=revision),
        lambda error: f"{name} of {repository} was not downloaded ({error}); the same command goes on",
    )


def _asked(what: str, ask: Callable[[], Any], refusal: Callable[[Exception], str]) -> Any:
    """Return what a server answers. Raise StorageLost if it stays away, and UserError with `refusal` if it refuses."""
    try:
        return patiently(what, ask)
    except StorageLost:
        raise
    except Exception as error:
        raise UserError(refusal(error)) from error


def _text_of(file: SourceFile, content: bytes, column: str) -> tuple[str | bytes, str]:
    """A document's text, in UTF-8 where it is long, and why there is none."""
    is_line = file.name.endswith(LINE_SUFFIXES)
    if len(content) > LONG:
        text = _value(content, column) if is_line else content
        if text is not None and _is_utf8(text):
            return (text, "") if text else ("", f"no text under {column!r}")
    try:
        if not is_line:
            text = content.decode()
        else:
            record = json.loads(content, parse_int=float)  # an int of more than 4,300 digits would be refused
            text = record.get(column) if isinstance(record, dict) else None
            if not isinstance(text, str):
                return "", f"no text under {column!r}"
            text.encode()
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except UnicodeEncodeError:
        return "", "half a character (a lone surrogate)"
    except json.JSONDecodeError:
        return "", "not JSON"
    except RecursionError:
        return "", "nested too deeply"
    return text, "" if text else "empty"


def _value(line: bytes, column: str) -> bytes | None:
    """A column of a long line of JSON, in UTF-8, empty where it is not there; None where `json` is to say what is
    wrong. `json` would hold the characters of line and value."""
    schema = pyarrow.schema([(column, pyarrow.large_string())])
    options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(line) + 1)
    try:
        table = pyarrow.json.read_json(pyarrow.BufferReader(line), reading, options)
    except pyarrow.ArrowException:
        return None
    values = table.column(column).cast(pyarrow.large_binary())
    value = values[0].as_py() if len(values) == 1 else b""
    return None if value == b"" else value or b""


def _is_utf8(content: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(content), 2**20):
            decoder.decode(content[start : start + 2**20])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True
