"""The code as it lies here, as an archive named by its hash: uncommitted changes too, but not what git ignores."""

import hashlib
import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from configs.schema import UserError

LARGEST = 100 * 2**20  # bytes of all files: more is hardly code


@dataclass(frozen=True)
class Code:
    """An archive of the repository."""

    archive: bytes
    """A .tar, the same to the byte for the same files."""
    digest: str
    """Its SHA-256, in hexadecimal."""

    @property
    def name(self) -> str:
        return self.digest[:16]


def pack(root: Path) -> Code:
    """Every file that git knows or would add. UserError where `root` is no repository, or holds more than 100 MiB."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode().strip() or error
        raise UserError(f"the code is read through git, which fails in {root}: {said}") from error
    # A file that git knows and that is deleted here is deleted there; a submodule's folder is left out.
    paths = [root / name for name in sorted(set(listed.split("\0")) - {""})]
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
    return Code(buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest())


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
