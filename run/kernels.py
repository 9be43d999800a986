"""The kernels that XLA:GPU chooses by autotuning, kept with the run: a later start computes with the same ones.

XLA keeps each choice in a file (openxla.org/xla/persisted_autotuning), and JAX the compiled programs. Both are stored
in the run's folder, so a run resumes exactly even without the cache. The cache also has the choices: a new run begins
with those of other runs on the machine, and gets the same bits. An archive of them is stored with the checkpoints.
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

CHOICES = "xla_gpu_per_fusion_autotune_cache_dir"  # JAX adds it to its cache folder


def use_choices(run_dir: str | Path) -> None:
    """Use the run's choices for later compilations, or the cache's if the run has none. Raise UserError if the run's
    cannot be read. Every process must call it."""
    folder = Path(run_dir).resolve() / "compiled"  # a part of the programs' keys: normalized
    on_first_process(lambda: _begin(folder / CHOICES, Path(run_dir) / KERNELS))
    (folder / CHOICES).mkdir(parents=True, exist_ok=True)  # for a process with its own folder
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
                f"{archive} cannot be read ({error}); it records the run's kernels. Restore it (with "
                "--checkpoint.folder there is a copy next to the checkpoints), or delete it: the run then uses "
                "kernels that are chosen again, and may round differently"
            ) from error
    elif known_choices().exists():
        shutil.copytree(known_choices(), partial)
    partial.mkdir(parents=True, exist_ok=True)  # nothing was chosen yet
    partial.rename(mine)


def keep_choices(run_dir: str | Path) -> None:
    """Pack the run's choices after compilation, and add new ones to the cache. Only the first process may call it."""
    mine, known, packed = Path(run_dir) / "compiled" / CHOICES, known_choices(), io.BytesIO()
    chosen = [path for path in mine.iterdir() if path.is_file()]  # XLA also has a folder `tmp` there
    known.mkdir(parents=True, exist_ok=True)
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive, TemporaryDirectory(dir=known.parent) as unfinished:
        for choice in chosen:
            archive.write(choice, choice.name)
            if not (known / choice.name).exists():  # other processes read and add at the same time
                whole = Path(unfinished) / choice.name
                write_whole(whole, choice.read_bytes())
                whole.rename(known / choice.name)
    write_whole(Path(run_dir) / KERNELS, packed.getbuffer())


def known_choices() -> Path:
    """Return the folder of all runs' choices on this machine, by version of XLA."""
    return cache_dir() / "kernels" / version("jaxlib")
