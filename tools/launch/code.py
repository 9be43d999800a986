"""Pack the code of this folder into an archive named by its hash, with uncommitted changes, but without ignored files
and the outputs of runs and reports."""

import hashlib
import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from configs.schema import UserError

LEFT = ("events.jsonl", "dataset.json")  # in the folders of runs and of datasets
LARGEST = 100 * 2**20  # bytes of all files: code is smaller


@dataclass(frozen=True)
class Code:
    """An archive of the repository."""

    archive: bytes
    """A .tar, the same to the byte for the same files."""
    names: frozenset[str]
    """Paths of the files in it."""

    @property
    def digest(self) -> str:
        """Return its SHA-256, in hexadecimal."""
        return hashlib.sha256(self.archive).hexdigest()

    @property
    def name(self) -> str:
        return self.digest[:16]


def pack(root: Path) -> Code:
    """Archive every file that git knows or would add, except folders of runs and datasets that it does not know. Raise
    UserError if `root` is no repository, or has more than 100 MiB."""
    known, new = listed(root, "--cached"), listed(root, "--others", "--exclude-standard")
    left = {path.parent for path in new if path.name in LEFT}
    # A tracked file that is deleted here is deleted there; a submodule's folder is left out.
    paths = sorted(known | {path for path in new if not left & set(path.parents)})
    sizes = {path: path.lstat().st_size for path in paths if path.is_symlink() or path.is_file()}
    if sum(sizes.values()) > LARGEST:
        raise UserError(
            f"the code is {sum(sizes.values()) >> 20} MiB, over {LARGEST >> 20} MiB; the largest file is "
            f"{max(sizes, key=lambda path: sizes[path]).relative_to(root)}: name it in .gitignore"
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sizes:
            # Owner and time do not change the hash. A hard link becomes a separate file.
            entry = tarfile.TarInfo(str(path.relative_to(root)))
            entry.mode = 0o755 if path.lstat().st_mode & 0o100 else 0o644
            if path.is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, str(path.readlink())
                archive.addfile(entry)
            else:
                content = path.read_bytes()
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return Code(buffer.getvalue(), frozenset(str(path.relative_to(root)) for path in sizes))


def listed(root: Path, *which: str) -> set[Path]:
    """Return the files that git lists. Raise UserError if there is no git or no repository."""
    try:
        done = subprocess.run(["git", "ls-files", "-z", *which], cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", b"").decode().strip() or error
        raise UserError(f"the code is read through git, which fails in {root}: {message}") from error
    return {root / name for name in done.stdout.decode().split("\0") if name}


def unpack(code: Code, archive: str, folder: str) -> str:
    """Return shell that unpacks the file `archive` as `folder`/<hash>, checked. It is harmless if it runs twice, or at
    the same time twice: the folder appears complete and does not change. `folder` may begin with $HOME."""
    there = f'"{folder}/{code.name}"'
    return (
        f'test -d {there} || {{ echo "{code.digest}  {archive}" | sha256sum --check --quiet && '
        f'mkdir -p "{folder}" && fresh=$(mktemp -d "{folder}/unpacking.XXXXXX") && '
        f'tar -xf "{archive}" -C "$fresh" && chmod 755 "$fresh" && '
        f'{{ mv -T "$fresh" {there} 2>/dev/null || {{ rm -rf "$fresh"; test -d {there}; }}; }}; }}'
    )
