"""List meshes, rows, recomputation and chunks, and find which fit and which is best, by the closed form alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from configs.schema import UserError
from hosts.machines import HEADROOM, name_of
from tools.plan.step_time import StepTime, Traffic, communication, step_time
from tools.plan.whole_run import WholeRun, whole_run
from training.candidate import CHUNKS, REMAT, Candidate
from training.memory import device_bytes, evaluation_memory, memory, most

ERROR = 0.136
"""The largest error of the closed form's memory on held-out programs (docs/planning.md)."""
WORTH = 1.05
"""How many times as long a step may take, to stay below the limit by ERROR."""
MAX_TENSOR = 8


@dataclass(frozen=True)
class Given:
    """The user's figures other than config and topology, and measurements of runs."""

    price: float | None = None
    """Dollars a device and hour."""
    preemptions: float = 0.0
    """Preemptions of the complete run, a day."""
    seconds: float = 1.0
    """Measured over planned seconds of a step: the closed form's are multiplied by it."""
    bytes: float = 1.0
    """The same of a device's bytes."""


@dataclass(frozen=True)
class Row:
    """A candidate with its plan."""

    candidate: Candidate
    given: Given
    parts: dict[str, float]
    """Bytes of a step on a device, by part."""
    evaluation: dict[str, float]
    """Bytes on a device: `held-out rows`; everything during an `evaluation` and during `sampling`."""
    traffic: list[Traffic]
    time: StepTime
    run: WholeRun
    compiled: int | None = None
    """Bytes that its compiled program asks for; None if it was not compiled."""

    @property
    def bytes(self) -> float:
        """Return the bytes that a device needs: the step's and the held-out rows', or an evaluation's or sampling's if
        they are more. The step's are its compiled program's, or else the closed form's."""
        step = sum(self.parts.values()) if self.compiled is None else self.compiled
        return most(step, self.evaluation)

    @property
    def fits(self) -> bool:
        return self.bytes <= HEADROOM * self.candidate.machine.for_programs

    @property
    def safe(self) -> bool:
        """Return whether it fits even if the closed form's memory is wrong by ERROR."""
        return self.bytes * (1 + ERROR) <= HEADROOM * self.candidate.machine.for_programs


def row_of(candidate: Candidate, given: Given) -> Row:
    """Return a candidate's plan. Raise UserError if its sizes do not divide."""
    traffic = communication(candidate)
    time = StepTime(*(given.seconds * seconds for seconds in step_time(candidate, traffic)))
    parts = memory(candidate)
    evaluation = evaluation_memory(candidate, parts)
    parts, evaluation = ({name: size * given.bytes for name, size in each.items()} for each in (parts, evaluation))
    run = whole_run(candidate, time, given.price, given.preemptions)
    return Row(candidate, given, parts, evaluation, traffic, time, run)


def candidates(base: Candidate) -> Iterator[Candidate]:
    """Yield every mesh whose `fsdp` and `tensor` are valid powers of two. Combine each with the step's rows, halved
    repeatedly, all kinds of recomputation, and one chunk or more."""
    model, batch, devices = base.config.model, base.config.batch, base.topology.devices
    rows = batch.tokens_per_step // batch.sequence_length
    more = model.loss_chunks if model.loss_chunks > 1 else CHUNKS
    chunks = sorted({1, more} if batch.sequence_length % more == 0 else {model.loss_chunks})
    powers = [2**i for i in range(devices.bit_length())]
    heads = lambda tensor: 0 in (model.kv_heads % tensor, tensor % model.kv_heads)
    divides = model.heads, model.kv_heads * model.head_dim, model.vocab_size
    for tensor in (t for t in powers if t <= MAX_TENSOR and heads(t) and all(n % t == 0 for n in divides)):
        for fsdp in (n for n in powers if n <= devices // tensor):
            whole = devices % (fsdp * tensor) == 0 and model.width % fsdp == 0
            replicas = devices // tensor
            vocabulary = not model.value_embeddings or model.vocab_size % fsdp == 0
            if whole and vocabulary and rows % replicas == 0:
                for share in halvings(rows // replicas):
                    yield from (base.changed(fsdp, tensor, share, remat, n) for remat in REMAT for n in chunks)


def halvings(n: int) -> list[int]:
    """Return n, n / 2, ... up to the first odd number."""
    return [n] + (halvings(n // 2) if n % 2 == 0 else [])


def search(base: Candidate, given: Given) -> list[Row]:
    """Return all candidates, the fastest that fit first; of equally fast ones, the one with the least memory. Before
    them comes the fastest safe one, if it costs little. Raise UserError if the devices cannot share the step's rows."""
    rows = [row_of(candidate, given) for candidate in candidates(base)]
    if not rows:
        base.step  # says what does not divide  # noqa: B018
        raise UserError(f"no mesh of {name_of(base.topology)} divides this network and its step")
    rows.sort(key=lambda row: (not row.fits, row.time.expected, row.bytes))
    safe = (row for row in rows if row.safe and row.time.expected <= WORTH * rows[0].time.expected)
    first = next(safe, rows[0])
    return [first, *(row for row in rows if row is not first)]


def nearest_change(row: Row) -> tuple[str, Row] | None:
    """Return the options of the fitting candidate with the fewest changes, and its row; None if none fits."""
    asked = row.candidate.options() | {"mesh.data": -1}
    fitting = [new for other in candidates(row.candidate) if (new := row_of(other, row.given)).fits]
    differs = lambda new: {k: v for k, v in new.candidate.options().items() if v != asked[k]}
    if not fitting:
        return None
    best = min(fitting, key=lambda new: (len(differs(new)), new.time.expected))
    return " ".join(f"--{name}={value}" for name, value in differs(best).items()), best


def more_devices(base: Candidate) -> str:
    """Return the topology with 2 to 64 times the slices or nodes, as few as something fits; empty if nothing does."""
    for times in (2, 4, 8, 16, 32, 64):
        larger = base.topology._replace(slices=base.topology.slices * times)
        for candidate in candidates(Candidate(base.config, larger)):
            if device_bytes(candidate) <= HEADROOM * base.machine.for_programs:
                return name_of(larger)
    return ""
