"""Estimate a step's seconds as a bracket: the sum of matrix products, passes over memory, attention and communication.

None of this was measured on a TPU. PASSES was read off XLA's estimated cycles (docs/planning.md). One H200 ran a sketch
of the same network: matrix products reached 790 of 989 TFLOP/s, attention 330. REACHES of a GPU is chosen so that the
middle of the bracket is what nanochat's d20 reaches in public on eight H100: an MFU of some 47%.

Communication is the collectives of training/step.py and model/parallel.py. Their bytes are a device's payload, as
bench.collectives reads them: the result of an all-gather, the operand of all else.
"""

from collections import defaultdict
from functools import cache
from typing import NamedTuple

from model.kernels import Kernel, attention_kernel, query_spans, splash_block, window_of
from training.candidate import Candidate

REACHES = {False: ((1.0, 0.75), (0.5, 0.2), (1.0, 0.75)), True: ((0.85, 0.65), (0.45, 0.22), (1.0, 0.75))}
"""Shares of a TPU's and a GPU's figures that matrix products, attention's kernels (counting the products that they run,
`products`) and passes over memory reach: each at best, and at worst."""
PASSES = 72
"""Times that element-wise passes read or write one width of a block's tokens, forward and backward."""
AGAIN = {"none": 0, "products": 4, "block": 16}
"""How many more times if a block is recomputed."""
LOGIT_PASSES = 3
"""Times that the logits are read or written."""
VECTOR, LOGIT_VECTOR = 3.8, 19.0
"""Cycles of a TPU core's vector unit for 1,024 numbers: in one of PASSES, and in everything done to logits. With these
two, XLA's estimates for v5e, v5p and v6e agree. Their cores have the same vector unit, and memory of different
speeds."""
START, HOP = 10e-6, 1e-6
"""Seconds that a collective takes to start, and that a hop to the next device takes. Assumed."""
PARTS = ("products", "attention", "passes", "links", "network")


class StepTime(NamedTuple):
    """Seconds of a step."""

    fast: float
    """Everything at its best, with all possible overlap."""
    slow: float
    """Everything at its worst, one after the other."""
    products: float
    """Matrix products at their best; the following are at their best, too."""
    attention: float
    passes: float
    """Element-wise passes over memory, including the optimizer's."""
    links: float
    """Communication inside a slice or node."""
    network: float
    """Communication between slices or nodes."""

    @property
    def expected(self) -> float:
        """Return the geometric middle of the bracket, which orders candidates."""
        return (self.fast * self.slow) ** 0.5

    @property
    def limiter(self) -> str:
        """Return the name of the part that takes most time."""
        part = max(PARTS, key=lambda name: getattr(self, name))
        return {"products": "matrix units", "passes": "memory"}.get(part, part)


class Traffic(NamedTuple):
    """All collectives of one kind over one axis."""

    kind: str
    """`all-gather`, `reduce-scatter`, `all-reduce`"""
    axis: str
    in_scan: bool
    """In the scan over micro-batches."""
    times: int
    """Collectives a step."""
    bytes: float
    """A device's payload, a step."""
    link: str
    """`inside` of a slice or node, or `between` them."""
    fast: float
    """Seconds with all of a device's links at once, and in steps between slices or nodes."""
    slow: float
    """Seconds in one ring of two directions, each device sending everything between slices or nodes."""

    @property
    def overlaps(self) -> bool:
        """Return whether other work can run at the same time: during gathers and scatters over `fsdp` in the scan. The
        residual stream waits for the collectives over `tensor`, and a step for those after the scan."""
        return self.axis == "fsdp" and self.in_scan


def communication(candidate: Candidate) -> list[Traffic]:
    """Return what crosses each axis of the mesh in a step."""
    sizes, width = candidate.sizes, candidate.bytes_of_type
    micro_batches, model = candidate.step[0], candidate.config.model
    sums: dict[tuple[str, str, bool], tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def add(kind: str, axis: str, in_scan: bool, times: int, size: float) -> None:
        before = sums[kind, axis, in_scan]
        sums[kind, axis, in_scan] = before[0] + times, before[1] + times * size

    for p, count in candidate.kinds:
        whole = p.size / (sizes["tensor"] if "tensor" in p.axes else 1)
        replica = whole / (sizes["fsdp"] if "fsdp" in p.axes else 1)
        padded = candidate.share(p.shape, p.axes) * sizes["data"]
        add("all-gather", "data", False, count, (4 if len(p.shape) == 1 else width) * padded)
        add("reduce-scatter", "data", False, count, 4 * padded)
        if "fsdp" in p.axes:
            # XLA keeps gathered parameters for the backward pass, unless it recomputes (docs/mesh.md).
            times = 2 if model.remat != "none" and p.product and p.group != "lm_head" else 1
            add("all-gather", "fsdp", True, times * micro_batches * count, width * whole)
            add("reduce-scatter", "fsdp", True, micro_batches * count, 4 * whole)
        else:
            add("all-reduce", "fsdp", False, count, 4 * replica)
    if sizes["tensor"] > 1:
        # Forward: the embedding, and two sums a block. Backward: two a block, and the head's. The loss: two numbers a
        # token. Recomputation repeats attention's sum, which the MLP's input needs.
        again = 0 if model.remat == "none" else model.depth
        of_width = micro_batches * (4 * model.depth + 2 + again)
        add("all-reduce", "tensor", True, of_width, width * candidate.tokens * model.width)
        add("all-reduce", "tensor", True, micro_batches * 2, 4 * candidate.tokens)
    return [_timed(candidate, *key, *value) for key, value in sums.items() if sizes[key[1]] > 1]


def _timed(candidate: Candidate, kind: str, axis: str, in_scan: bool, times: int, size: float) -> Traffic:
    machine, whole, across = candidate.machine, candidate.sizes[axis], candidate.across[axis]
    # XLA:TPU makes all-reduces of the reduce-scatters over `data` (docs/mesh.md): twice the bytes of a ring.
    reduces = kind == "all-reduce" or (kind == "reduce-scatter" and axis == "data" and not machine.gpu)
    by_sums = candidate.scatters_by_sums if kind == "reduce-scatter" else candidate.gathers_by_sums
    reduces |= axis == "fsdp" and by_sums
    rounds = 2 if reduces else 1
    within = whole // across
    sent = rounds * size * (within - 1) / within
    fast = sent / machine.links + times * START
    slow = sent / machine.links * max(1, machine.directions / 2) + times * (START + HOP * whole / 2)
    if across > 1:
        between = rounds * size * (across - 1) / across / machine.network
        fast, slow = fast + between / within, slow + between
    return Traffic(kind, axis, in_scan, times, size, "between" if across > 1 else "inside", fast, slow)


def step_time(candidate: Candidate, traffic: list[Traffic] | None = None) -> StepTime:
    """Return a step's time, by closed form."""
    machine = candidate.machine
    traffic = communication(candidate) if traffic is None else traffic
    peak = machine.peak(candidate.dtype)
    ideal = product_flops(candidate) / peak, attention_flops(candidate) / peak, pass_seconds(candidate)
    best, worst = ([at / share[i] for at, share in zip(ideal, REACHES[machine.gpu])] for i in (0, 1))
    hidden = sum(t.fast for t in traffic if t.overlaps)
    shown = sum(t.fast for t in traffic if not t.overlaps)
    sent = [sum(t.fast for t in traffic if t.link == link) for link in ("inside", "between")]
    return StepTime(max(sum(best), hidden) + shown, sum(worst) + sum(t.slow for t in traffic), *best, *sent)


def product_flops(candidate: Candidate) -> float:
    """Return FLOPs of a step's matrix products on a device, including recomputed ones, without attention."""
    model, sizes = candidate.config.model, candidate.sizes
    tokens = candidate.step[0] * candidate.tokens
    hidden = model.width, 4 * model.width  # of the MLP's first matrix
    again = lambda p: model.remat == "block" or (model.remat == "products" and p.shape == hidden)
    each = lambda p: p.size / (sizes["tensor"] if "tensor" in p.axes else 1) * tokens
    flops = sum(
        count * each(p) * (6 + 2 * (p.group == "matrices" and again(p))) for p, count in candidate.kinds if p.product
    )
    return flops + muon_flops(candidate)


def muon_flops(candidate: Candidate) -> float:
    """Return FLOPs of five iterations for each matrix, in float32, weighted by its cost over the compute type's. Each
    device has its share of the matrices (training/muon.py)."""
    if candidate.config.optimizer.matrices.kind != "muon":
        return 0.0
    each = lambda short, long: 5 * (4 * short**2 * long + 2 * short**3)
    flops = sum(count * each(*sorted(p.shape)) for p, count in candidate.kinds if p.group == "matrices")
    machine = candidate.machine
    return machine.peak(candidate.dtype) / machine.peak("float32") * flops / candidate.topology.devices


def kernel_of(candidate: Candidate) -> Kernel:
    """Return attention's kernel on the candidate's devices."""
    machine, config = candidate.machine, candidate.config
    platform, documents = "gpu" if machine.gpu else "tpu", config.data.mask_documents
    length, head_dim = candidate.step[2], config.model.head_dim
    return attention_kernel(platform, machine.capability, candidate.dtype, length, head_dim, documents)


def visible_blocks(length: int, window: int | None) -> int:
    """Return how many of splash attention's blocks contain a score that the mask leaves."""
    block, back = splash_block(length), length if window is None else window
    ends = range(block, length + 1, block)
    return sum((end - 1) // block - max(0, end - block - back) // block + 1 for end in ends)


class Products(NamedTuple):
    """Products per score times scores, for one head of a row."""

    forward: float
    backward: float


@cache
def products(kernel: Kernel, length: int, window: int | None) -> Products:
    """Return the products that a kernel runs, with masked scores of partly masked blocks and recomputed scores.

    Attention multiplies twice for each score forward (queries by keys, shares by values) and four times backward. A
    kernel that keeps no scores recomputes them, which makes five (arXiv:2205.14135).
    """
    if kernel == "splash":  # one backward kernel takes 3 for queries' gradients, another 4 for keys' and values'
        scores = visible_blocks(length, window) * splash_block(length) ** 2
        return Products(2 * scores, 7 * scores)
    if kernel == "cudnn":  # its blocks are small
        window = min(length if window is None else window, length)
        scores = window * (length - window / 2)
        return Products(2 * scores, 5 * scores)
    scores = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in query_spans(length, window))
    return Products(2 * scores, (4 if kernel == "plain" else 5) * scores)


def attention_flops(candidate: Candidate) -> float:
    """Return FLOPs of a step on a device: the products that its kernel runs. If blocks are recomputed, the forward pass
    counts twice."""
    model, length, kernel = candidate.config.model, candidate.step[2], kernel_of(candidate)
    forwards, scores = 2 if model.remat == "block" else 1, 0.0
    for layer in range(model.depth):
        run = products(kernel, length, window_of(model, layer))
        scores += forwards * run.forward + run.backward
    heads = model.heads * model.head_dim / candidate.sizes["tensor"]
    return candidate.step[0] * candidate.step[1] * 2 * scores * heads


def pass_seconds(candidate: Candidate) -> float:
    """Return seconds of a step outside products and attention, on a device: reading and writing memory, or the vector
    unit's work if that takes longer."""
    model, sizes, width, machine = candidate.config.model, candidate.sizes, candidate.bytes_of_type, candidate.machine
    micro_batches = candidate.step[0]

    def seconds(numbers: float, passes: float, cycles: float) -> float:
        in_memory = numbers * passes * width / machine.bandwidth
        return max(in_memory, numbers * cycles / machine.vector) if machine.vector else in_memory

    # `tensor` divides what half of a block's passes read.
    shared = 0.5 + 0.5 / sizes["tensor"]
    extra = 8 * bool(model.resid_lambdas or model.x0_lambdas) + 2 * model.value_embeddings
    times = (PASSES + AGAIN[model.remat] + extra) * shared
    blocks = seconds(candidate.tokens * model.width * model.depth, times, times * VECTOR)
    logits = seconds(candidate.tokens * model.vocab_size / sizes["tensor"], LOGIT_PASSES, LOGIT_VECTOR)
    whole = sum(count * p.size / (sizes["tensor"] if "tensor" in p.axes else 1) for p, count in candidate.kinds)
    replica = whole / sizes["fsdp"]
    # Sums of gradients are read and written in every micro-batch, the head's with every chunk; the update reads and
    # writes float32 state.
    sums = 8 * (replica + (model.loss_chunks - 1) * model.width * model.vocab_size / sizes["tensor"])
    update = 2 * 4 * replica + 4 * 8 * replica / sizes["data"]
    return micro_batches * (blocks + logits + sums / machine.bandwidth) + update / machine.bandwidth
