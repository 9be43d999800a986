"""The code of this folder, as an archive named by its hash: uncommitted changes too, but not what git ignores, nor what
runs and reports have left."""

import hashlib
import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from configs.schema import UserError

LEFT = ("events.jsonl", "dataset.json")  # in the folders of runs and of datasets
LARGEST = 100 * 2**20  # bytes of all files: more is hardly code


@dataclass(frozen=True)
class Code:
    """An archive of the repository."""

    archive: bytes
    """A .tar, the same to the byte for the same files."""
    digest: str
    """Its SHA-256, in hexadecimal."""
    names: frozenset[str]
    """Paths of the files in it."""

    @property
    def name(self) -> str:
        return self.digest[:16]


def pack(root: Path) -> Code:
    """Every file that git knows or would add, but for the folders of runs and datasets that it does not know. UserError
    where `root` is no repository, or holds more than 100 MiB."""
    known, new = _listed(root, "--cached"), _listed(root, "--others", "--exclude-standard")
    left = {path.parent for path in new if path.name in LEFT}
    # A file that git knows and that is deleted here is deleted there; a submodule's folder is left out.
    paths = sorted(known | {path for path in new if not left & set(path.parents)})
    paths = [path for path in paths if path.is_symlink() or path.is_file()]
    sizes = {path: path.lstat().st_size for path in paths}
    if sum(sizes.values()) > LARGEST:
        largest = max(paths, key=lambda path: sizes[path])
        raise UserError(
            f"the code is {sum(sizes.values()) >> 20} MiB, which is hardly code; the largest file is "
            f"{largest.relative_to(root)}: name it in .gitignore"
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in paths:
            about = archive.gettarinfo(path, str(path.relative_to(root)))
            # What does not change a file's meaning does not change the hash. A hard link is a file of its own.
            about.mtime, about.uid, about.gid, about.uname, about.gname = 0, 0, 0, "", ""
            about.mode = 0o755 if about.mode & 0o100 else 0o644
            if path.is_symlink():
                archive.addfile(about)
            else:
                content = path.read_bytes()
                about.type, about.linkname, about.size = tarfile.REGTYPE, "", len(content)
                archive.addfile(about, io.BytesIO(content))
    names = frozenset(str(path.relative_to(root)) for path in paths)
    return Code(buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest(), names)


def _listed(root: Path, *which: str) -> set[Path]:
    """The files that git lists. UserError where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "ls-files", "-z", *which], cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode().strip() or error
        raise UserError(f"the code is read through git, which fails in {root}: {said}") from error
    return {root / name for name in done.stdout.decode().split("\0") if name}


def unpack(code: Code, archive: str, folder: str) -> str:
    """Shell that unpacks the file `archive` as `folder`/<hash>, checked. Harmless when it runs twice, or at the same
    time twice: the folder appears whole, and stays as it is. `folder` may begin with $HOME."""
    there = f'"{folder}/{code.name}"'
    return (
        f'test -d {there} || {{ echo "{code.digest}  {archive}" | sha256sum --check --quiet && '
        f'mkdir -p "{folder}" && fresh=$(mktemp -d "{folder}/unpacking.XXXXXX") && '
        f'tar -xf "{archive}" -C "$fresh" && chmod 755 "$fresh" && '
        f'{{ mv -T "$fresh" {there} 2>/dev/null || {{ rm -rf "$fresh"; test -d {there}; }}; }}; }}'
    )


def environment(setup: str) -> str:
    """Shell that runs the set-up in the code's folder. UserError for an empty one."""
    if not setup.strip():
        raise UserError("--setup is empty; give a command that makes .venv, or --setup=true where there is one")
    return f"bash -c {quote(setup)}"
