"""What a start does with checkpoints before it continues: it clears what a kill left, restores the newest that can be
read, and moves others aside."""

import time
from pathlib import Path

from etils import epath

from hosts.distributed import on_first_process
from run.checkpoint import Checkpoints
from run.checkpoint_files import DELETED, HALF_DONE, UNFINISHED
from run.folder import FACTS, RunFolder, reading
from system.errors import Damaged, NoCheckpoint
from system.files import first_line, in_bucket, is_there
from system.messages import LOGGER
from training.state import TrainState


def open_cleared(run: RunFolder) -> Checkpoints:
    """Clear a run's folder of checkpoints of what a kill left, and return the complete ones. Every process must call
    it."""
    with reading(f"the checkpoints in {run}"):
        on_first_process(lambda: run.retried(clear, run))
    return Checkpoints(run)


def clear(run: RunFolder) -> None:
    """Delete what a kill or a failure left half written or half deleted. Move aside any other incomplete folder with a
    checkpoint's name, such as a copy under way. On the first process."""
    folder = run.checkpoints
    if not is_there(folder):
        folder.mkdir(parents=True)
    for path in folder.iterdir() if is_there(folder) else ():  # a bucket has no empty folders
        is_incomplete = path.name.isdigit() and not is_there(path / FACTS)
        if path.name.endswith((HALF_DONE, DELETED)) or (is_incomplete and is_there(path / UNFINISHED)):
            path.rmtree()
        elif is_incomplete:
            move_aside(path)
            LOGGER.warning(f"checkpoint {path.name} cannot be read (it is incomplete); it is in bad-checkpoints")


def restore_newest(checkpoints: Checkpoints, abstract: TrainState) -> tuple[TrainState, dict] | None:
    """Return the newest state that can be read, or None without any checkpoint. Report damaged ones, and move them to
    bad-checkpoints/. Raise NoCheckpoint if all are damaged, and StorageLost if a disk or store does not answer, which
    does not mean damage."""
    bad = []
    for step in reversed(checkpoints.steps):
        try:
            restored = checkpoints.restore(step, abstract)
        except Damaged as error:
            bad.append(step)
            LOGGER.warning(f"checkpoint {step} cannot be read ({first_line(error)}); trying the one before it")
            continue
        if bad:
            on_first_process(lambda: [move_aside(checkpoints.folder / str(step)) for step in bad])
        return restored
    if bad:
        raise NoCheckpoint(f"none of the checkpoints in {checkpoints.folder} can be read; nothing was changed")
    return None


def set_aside_after(step: int, checkpoints: Checkpoints) -> None:
    """Move the checkpoints newer than `step`'s to newer-checkpoints/. Every process must call it."""
    newer = [other for other in checkpoints.steps if other > step]

    def move() -> None:
        for other in newer:
            move_aside(checkpoints.folder / str(other), "newer-checkpoints")

    on_first_process(lambda: checkpoints.run.retried(move))
    if newer:
        moved = checkpoints.folder.parent / "newer-checkpoints"
        LOGGER.info(f"checkpoints {', '.join(map(str, newer))} are in {moved}")


def move_aside(path: epath.Path, name: str = "bad-checkpoints") -> None:
    """Move a checkpoint to the folder `name` of the run, on the first process. By default it is unreadable. The folder
    is next to `checkpoints` itself, not next to a link to it: a rename does not cross disks."""
    folder = path.parent if in_bucket(path) else epath.Path(Path(path.parent).resolve())
    target = folder.parent / name
    target.mkdir(exist_ok=True)
    if in_bucket(path):
        (target / "README").write_text("Checkpoints that are not used.")  # a bucket has no empty folders
    path.rename(target / f"{path.name}-{int(time.time())}")
