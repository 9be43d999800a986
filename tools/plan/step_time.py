"""Estimate a step's seconds as a bracket: the sum of matrix products, passes over memory, attention and communication.

None of this was measured on a TPU. PASSES was read off XLA's estimated cycles (docs/planning.md). One H200 ran a sketch
of the same network: matrix products reached 790 of 989 TFLOP/s, attention 330. GPU_REACHES is chosen so that the middle
of the bracket is what nanochat's d20 reaches in public on eight H100: an MFU of some 47%.
"""

from typing import NamedTuple

from model.kernels import Kernel, attention_kernel, products, window_of
from tools.plan.communication import Traffic, communication
from training.candidate import Candidate

PRODUCTS = (1.0, 0.75)
"""Share of the peak that matrix products reach: at best, and at worst."""
ATTENTION = (0.5, 0.2)
"""The same for attention's kernels, counting the products that they run (`model.kernels.products`)."""
MEMORY = (1.0, 0.75)
"""Share of the memory's bandwidth that passes over it reach."""
GPU_REACHES = (0.85, 0.65), (0.45, 0.22), (1.0, 0.75)
"""PRODUCTS, ATTENTION and MEMORY for a GPU."""
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

    def times(self, factor: float) -> "StepTime":
        """Return all of them multiplied by `factor`."""
        return StepTime(*(factor * seconds for seconds in self))

    @property
    def limiter(self) -> str:
        """Return the name of the part that takes most time."""
        takes = {name: getattr(self, name) for name in ("products", "attention", "passes", "links", "network")}
        names = {"products": "matrix units", "passes": "memory"}
        most = max(takes, key=lambda name: takes[name])
        return names.get(most, most)


def reaches(gpu: bool) -> tuple[tuple[float, float], ...]:
    """Return the shares of a machine's figures that products, attention and passes over memory reach."""
    return GPU_REACHES if gpu else (PRODUCTS, ATTENTION, MEMORY)


def step_time(candidate: Candidate, traffic: list[Traffic] | None = None) -> StepTime:
    """Return a step's time, by closed form."""
    machine = candidate.machine
    traffic = communication(candidate) if traffic is None else traffic
    peak = machine.peak(candidate.dtype)
    products = product_flops(candidate) / peak
    attention = attention_flops(candidate) / peak
    passes = pass_seconds(candidate)
    shares = reaches(machine.gpu)
    best, worst = ([at / share[i] for at, share in zip((products, attention, passes), shares)] for i in (0, 1))
    hidden = sum(t.fast for t in traffic if t.overlaps)
    shown = sum(t.fast for t in traffic if not t.overlaps)
    sent = {link: sum(t.fast for t in traffic if t.link == link) for link in ("inside", "between")}
    return StepTime(
        max(sum(best), hidden) + shown,
        sum(worst) + sum(t.slow for t in traffic),
        best[0],
        best[1],
        best[2],
        sent["inside"],
        sent["between"],
    )


def product_flops(candidate: Candidate) -> float:
    """Return FLOPs of a step's matrix products on a device, including recomputed ones, without attention."""
    model, sizes = candidate.config.model, candidate.sizes
    tokens = candidate.step[0] * candidate.tokens
    hidden = model.width, 4 * model.width  # of the MLP's first matrix
    again = lambda p: model.remat == "block" or (model.remat == "products" and p.shape == hidden)
    flops = 0.0
    for p, count in candidate.kinds:
        if p.product:
            flops += (
                count
                * p.size
                / (sizes["tensor"] if "tensor" in p.axes else 1)
                * tokens
                * (6 + 2 * (p.group == "matrices" and again(p)))
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


def attention_flops(candidate: Candidate) -> float:
    """Return FLOPs of a step on a device: the products that its kernel runs. They include masked scores of partly
    masked blocks and products that it repeats. If blocks are recomputed, the forward pass counts twice."""
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
