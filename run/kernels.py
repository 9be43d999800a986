"""The kernels that XLA:GPU chooses by timing them, kept with the run: a later start computes with the same ones.

XLA keeps each choice in a file (openxla.org/xla/persisted_autotuning), and JAX the compiled programs. Both lie in the
run's folder, so that a run goes on exactly whatever becomes of the cache. The choices lie in the cache too: a new run
begins with those that others on the machine have made, and is theirs to the bit. A file of them goes with the
checkpoints.
"""

import shutil
from importlib.metadata import version
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from run.runtime import cache_dir, on_first_process

ARCHIVE = "kernels.zip"
CHOICES = "xla_gpu_per_fusion_autotune_cache_dir"  # which JAX adds to the folder of its cache


def use_choices(run_dir: str | Path) -> None:
    """From here on programs are compiled with the choices of the run, or, where it has none, with those of the cache.
    Every process must call it."""
    folder = Path(run_dir).resolve() / "compiled"  # a part of the programs' keys: the same however it is spelled
    on_first_process(lambda: _begin(folder / CHOICES, Path(run_dir) / ARCHIVE))
    (folder / CHOICES).mkdir(parents=True, exist_ok=True)  # of a process that has a folder of its own
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()


def _begin(mine: Path, archive: Path) -> None:
    if mine.exists():
        return
    partial = mine.with_name("partial")
    shutil.rmtree(partial, ignore_errors=True)
    if archive.exists():
        shutil.unpack_archive(archive, partial)
    elif known_choices().exists():
        shutil.copytree(known_choices(), partial)
    else:
        partial.mkdir(parents=True)
    partial.rename(mine)


def keep_choices(run_dir: str | Path) -> None:
    """Once the run's programs are compiled: packs its choices, and adds to the cache those that are new there. Only
    the first process may call it."""
    mine, known = Path(run_dir) / "compiled" / CHOICES, known_choices()
    known.mkdir(parents=True, exist_ok=True)
    for choice in mine.iterdir():
        if not (known / choice.name).exists():
            shutil.copy(choice, known)
    partial = shutil.make_archive(str(Path(run_dir) / f"{ARCHIVE}.partial"), "zip", mine)
    Path(partial).replace(Path(run_dir) / ARCHIVE)


def known_choices() -> Path:
    """Those of all runs on this machine; another XLA makes its own."""
    return cache_dir() / "kernels" / version("jaxlib")
