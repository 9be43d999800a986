"""The kernels that XLA:GPU chooses by timing them, kept with the run: a later start computes with the same ones.

XLA keeps each choice in a file (openxla.org/xla/persisted_autotuning), and JAX the compiled programs. Both lie in the
run's folder, so that a run continues exactly whatever becomes of the cache. The cache has the choices, too: a new run
begins with those that others on the machine have made, and is theirs to the bit. A file of them goes with the
checkpoints.
"""

import io
import shutil
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import jax
from jax.experimental.compilation_cache import compilation_cache

from configs.files import cache_dir, write_whole
from configs.schema import UserError
from hosts.runtime import on_first_process
from run.record import KERNELS

CHOICES = "xla_gpu_per_fusion_autotune_cache_dir"  # which JAX adds to the folder of its cache


def use_choices(run_dir: str | Path) -> None:
    """From here on programs are compiled with the choices of the run, or, where it has none, with those of the cache.
    UserError if the run's cannot be read. Every process must call it."""
    folder = Path(run_dir).resolve() / "compiled"  # a part of the programs' keys: the same however it is spelled
    on_first_process(lambda: _begin(folder / CHOICES, Path(run_dir) / KERNELS))
    (folder / CHOICES).mkdir(parents=True, exist_ok=True)  # of a process that has a folder of its own
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()


def _begin(mine: Path, archive: Path) -> None:
    if mine.exists():
        return
    partial = mine.with_name("partial")
    shutil.rmtree(partial, ignore_errors=True)
    if archive.exists():
        try:
            shutil.unpack_archive(archive, partial)
        except (shutil.ReadError, BadZipFile) as error:
            raise UserError(
                f"{archive} cannot be read ({error}); it says which kernels the run computes with. Restore it (with "
                "--checkpoint.folder there is a copy next to the checkpoints), or delete it: the run then uses "
                "kernels that are chosen again, and may round differently"
            ) from error
    elif known_choices().exists():
        shutil.copytree(known_choices(), partial)
    partial.mkdir(parents=True, exist_ok=True)  # where nothing was chosen yet
    partial.rename(mine)


def keep_choices(run_dir: str | Path) -> None:
    """Once programs are compiled: packs the run's choices, and adds to the cache those that are new there. Only the
    first process may call it."""
    mine, known, packed = Path(run_dir) / "compiled" / CHOICES, known_choices(), io.BytesIO()
    chosen = [path for path in mine.iterdir() if path.is_file()]  # XLA also has a folder there, `tmp`
    known.mkdir(parents=True, exist_ok=True)
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive, TemporaryDirectory(dir=known.parent) as unfinished:
        for choice in chosen:
            archive.write(choice, choice.name)
            if not (known / choice.name).exists():  # others read there, and add theirs, at the same time
                whole = Path(unfinished) / choice.name
                write_whole(whole, choice.read_bytes())
                whole.rename(known / choice.name)
    write_whole(Path(run_dir) / KERNELS, packed.getbuffer())


def known_choices() -> Path:
    """Those of all runs on this machine; another XLA makes its own."""
    return cache_dir() / "kernels" / version("jaxlib")
