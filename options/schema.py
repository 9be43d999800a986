"""Every option of a run, on one page.

A config file (`configs/small.py`) defines `get_config() -> Config`; the command line overrides single fields of it
(`--batch.rows_per_device=16`). A field's type says which values it takes, and what a change of it changes;
options/validation.py checks them. Only a config file sets options of type `InFile`. Nothing here imports from the rest
of the project, and nothing here computes.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, reduce
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from msgspec import Meta


class Role(Enum):
    """The role of an option, for modules that need it."""

    FREE = "speed, reporting, or a path whose content a fingerprint holds: it may differ when a run is continued"
    TRAINING = "how the network is trained; the network computes the same function"
    PATH = "a file or folder: ~ is the home folder; a URL is refused"
    STORE = "a path, or a bucket: gs://BUCKET/FOLDER"
    FILE = "set only by a config file, not on the command line"


SMEAR_CHANNELS = 24  # channels of the residual stream that the gate of `smear` reads, as in nanochat
MIN_VOCAB_SIZE = 266  # the 256 bytes, the BOS, the eight tokens of conversations, and a merge

T = TypeVar("T")
Positive = Annotated[T, Meta(gt=0)]
NotNegative = Annotated[T, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Free = Annotated[T, Role.FREE]
OfTraining = Annotated[T, Role.TRAINING]
InFile = tyro.conf.Fixed[tyro.conf.Suppress[Annotated[T, Role.FILE]]]
FilePath = Annotated[str, Role.PATH]
AnyPath = Annotated[str, Role.PATH, Role.STORE]
AnyPaths = Annotated[tuple[str, ...], Role.PATH, Role.STORE]
Packing = Literal["stream", "best_fit", "whole"]


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    depth: Positive[int] = 12
    """Transformer blocks."""
    width: Positive[int] = 768
    """Channels of the residual stream."""
    heads: Positive[int] = 6
    """Query heads."""
    kv_heads: Positive[int] = 6
    """Key and value heads; fewer than `heads` is grouped-query attention (arXiv:2305.13245). Must divide `heads`.
    `mesh.tensor` must divide them or be a multiple of them. With a multiple, several devices share a head."""
    head_dim: Annotated[int, Meta(gt=0, multiple_of=2)] = 128
    """Channels of one head; even, since rotary positions turn pairs of channels."""
    vocab_size: Annotated[int, Meta(ge=MIN_VOCAB_SIZE)] = 32768
    """Tokens of the tokenizer, the BOS included."""
    softcap: InFile[Positive[float]] = 15.0
    """Logits are capped to `softcap * tanh(logits / softcap)`. The bound saves the loss a pass for the maximum. At most
    87.3 - log(vocab_size): the loss divides by the sum of exp(logit), and float32 ends at exp(88.7) and exp(-87.3)."""
    dropout: OfTraining[Annotated[float, Meta(ge=0, lt=1)]] = 0.0
    """Share of the outputs of attention and MLP that a training step sets to zero before they join the residual stream;
    the others are scaled up (arXiv:1207.0580). For text that a run repeats (docs/data.md)."""
    loss_chunks: Free[Positive[int]] = 1
    """Parts in which the head and the loss process a micro-batch's tokens. Only one part's logits exist at a time: less
    memory, more time, the same result. Must divide `batch.sequence_length`."""
    rotary_base: InFile[Positive[float]] = 100_000.0
    """Base of the rotary wavelengths (arXiv:2104.09864)."""
    qk_scale: InFile[Positive[float]] = 1.0
    """Factor of queries and keys after their norm, to sharpen attention; 1.2 in nanochat's later networks."""
    window_pattern: str = "L"
    """Attention window of each block; the pattern repeats. L sees all earlier tokens of the row, S sees `short_window`
    tokens back (nanochat: SSSL). The last block is always L."""
    short_window: InFile[NotNegative[int]] = 0
    """Earlier tokens that a position sees in S blocks. 0: a quarter of `batch.sequence_length`, rounded up to a
    multiple of 128."""
    value_embeddings: bool = False
    """Every other block, the last one included, adds a vector per token to its values. It comes from the block's own
    table, gated per head by the input (after arXiv:2410.17897)."""
    value_embedding_every: InFile[Positive[int]] = 2
    """Distance of the blocks with value embeddings, counted back from the last one. 1 in nanochat of 2026-01-16."""
    value_gate_channels: InFile[Positive[int]] = 12
    """Channels of a block's input that the gates of value embeddings read; 32 in nanochat before 2026-03-09."""
    value_gate_limit: InFile[Positive[float]] = 3.0
    """A gate of value embeddings is this times a sigmoid; 2 in nanochat before 2026-03-09."""
    resid_lambdas: bool = False
    """Multiply the residual stream by a learned factor before each block."""
    x0_lambdas: bool = False
    """Add a learned share of the first embedding to the residual stream before each block."""
    smear: bool = False
    """Add the previous token's embedding, gated."""
    backout: bool = False
    """Subtract a learned share of the middle block's residual stream before the head."""
    dtype: OfTraining[Literal["auto", "bfloat16", "float32"]] = "auto"
    """Type of activations and of the parameters' copy in a step. `auto`: the faster one where the run begins, which it
    then keeps. That is bfloat16, except float32 on a GPU before Ampere (T4, V100), and on a CPU without AMX's or
    AVX-512's products of bfloat16 or with JAX before 0.12. Parameters, gradients and moments are always
    float32. `float32`: products are float32 on every platform, without TF32 or bfloat16 passes, which is about six
    times the work on a TPU."""
    remat: Free[Literal["none", "products", "block"]] = "none"
    """Activations that a block keeps for its backward pass: all; all except the MLP's hidden layer, which recomputes
    one product of six; or only its input. Less memory, more time, the same result."""


@dataclass(frozen=True)
class DataConfig:
    """The text, and its packing into rows."""

    source: Free[str] = "stdlib"
    """A dataset folder from data.prepare. A mixture gives each dataset's share of the rows (`0.7:DIR,0.3:DIR`). Raw
    text is prepared once in the cache: `stdlib` (this Python's standard library), `chat-stdlib` (conversations made of
    it), or a file, a folder or a glob of .txt, .md, .py, .jsonl, .parquet and .csv."""
    tokenizer: Free[str] = ""
    """A tokenizer.json, a folder with one, or `tiktoken:gpt2`, for raw text. Empty: train a byte-level BPE of
    `model.vocab_size` tokens on it. A dataset folder has its own."""
    val_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Share of raw text's documents to hold out, chosen by a hash of their texts."""
    packing: Packing = "stream"
    """`stream`: documents, each after a BOS, form one long stream that is cut into rows; nothing is padded or lost.
    `best_fit`: complete documents share rows, and every row starts with a BOS; documents longer than a row are cut.
    `whole`: likewise, but no document spans two rows; conversations need this."""
    too_long: Literal["cut", "drop"] = "cut"
    """With `whole`, a document of more than a row and one token, which is only a target: `cut` trains on its
    beginning, `drop` leaves it out."""
    mask_documents: bool = False
    """Restrict attention to a document. On a GPU it then runs without cuDNN's kernel (docs/performance.md)."""
    workers: InFile[Free[NotNegative[int]]] = 2
    """Threads that read batches ahead."""


@dataclass(frozen=True)
class BatchConfig:
    """The sizes of a step. They and the mesh determine the number of micro-batches, K."""

    sequence_length: Annotated[int, Meta(ge=2)] = 2048
    """Tokens per row."""
    tokens_per_step: Positive[int] = 524_288
    """Tokens of one optimizer step, over all devices and micro-batches."""
    rows_per_device: Free[Positive[int] | Literal["auto"]] = "auto"
    """Rows of a micro-batch on one device. It never changes the result. `auto`: as many as fit its memory
    (docs/planning.md). If a complete step has fewer rows per device, the step is one micro-batch."""

    @property
    def rows(self) -> int:
        """Return `rows_per_device` where it is a number: in every config that a run, an evaluation or a tool uses."""
        assert isinstance(self.rows_per_device, int), "rows_per_device=auto: run/fitting.py makes it a number"
        return self.rows_per_device


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule of every group's learning rate, as a factor of its peak rate."""

    kind: Literal["constant", "warmup_cosine", "warmup_constant_warmdown"] = "warmup_constant_warmdown"
    """After the warmup: stay constant; fall by a half cosine; or stay, then fall linearly over the last `warmdown` of
    the run."""
    warmup_steps: NotNegative[int] = 0
    """Steps of linear warmup: step t has (t + 1) / warmup_steps of the peak."""
    warmdown: Share = 0.65
    """Share of the run's steps in which the rate falls (`warmup_constant_warmdown`)."""
    matrices_warmdown: Share = 0.0
    """The same for the matrices of the blocks: for their rate, and for Muon's momentum. Some texts gain if they fall
    for longer than the other groups (modded-nanogpt #292; docs/recipe.md). 0: as `warmdown`."""
    final: InFile[Share] = 0.05
    """Final factor of the falling schedules."""


@dataclass(frozen=True)
class GroupConfig:
    """AdamW (arXiv:1711.05101) for one group of parameters."""

    peak_rate: Positive[float]
    """Learning rate that the schedule multiplies. `embed`, `value_embeds` and `lm_head` also scale it by
    (width / 768)^-0.5."""
    beta1: InFile[Decay] = 0.8
    """Decay of the first moment."""
    beta2: InFile[Decay] = 0.95
    """Decay of the second moment."""
    eps: InFile[Positive[float]] = 1e-10
    """Number added to the root of the second moment."""
    weight_decay: InFile[NotNegative[float]] = 0.0
    """Decoupled weight decay: a step subtracts `rate * weight_decay * parameter`."""


@dataclass(frozen=True)
class X0LambdasConfig(GroupConfig):
    """The group of `model.x0_lambdas`, whose rate is high."""

    warmup_steps: InFile[NotNegative[int]] = 0
    """Steps of linear warmup of this group's rate, if more than `optimizer.schedule.warmup_steps`."""


@dataclass(frozen=True)
class MatricesConfig(GroupConfig):
    """The matrices of the blocks."""

    weight_decay: NotNegative[float] = 0.0
    """Decoupled weight decay, as the other groups'."""
    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` uses the options of `optimizer.muon`, and ignores this group's other ones."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon for the matrices: orthogonalised momentum (kellerjordan.github.io/posts/muon), as in nanochat."""

    peak_rate: Positive[float] = 0.02
    """Learning rate that the schedule multiplies. For a matrix with more outputs than inputs, it is multiplied by the
    root of their ratio."""
    products: InFile[Literal["float32", "fewer_passes"]] = "float32"
    """Precision of the products. `fewer_passes`: three of bfloat16 on a TPU instead of six, three of TF32 on a GPU."""
    momentum: InFile[Decay] = 0.97
    """Decay of the first moment (Nesterov), after its own warmup and until the rate's warmdown."""
    momentum_start: InFile[Decay] = 0.85
    """At step 0."""
    momentum_warmup_steps: InFile[NotNegative[int]] = 400
    """Steps of linear rise of the momentum. If the warmdown begins earlier, it falls from its current value."""
    momentum_final: InFile[Decay] = 0.9
    """Momentum at the end of the warmdown."""
    beta2: InFile[Decay] = 0.9
    """Decay of the second moment of a matrix's rows or columns, which normalizes the update (arXiv:2510.05491)."""
    weight_decay: NotNegative[float] = 0.28
    """Decoupled weight decay, only for elements where it agrees with the update (arXiv:2411.16085). It falls to 0 by a
    half cosine."""


@dataclass(frozen=True)
class OptimizerConfig:
    """One group for each kind of parameter: AdamW, and for the matrices Muon if asked for.

    `eps` is 1e-4 for groups whose first gradient is zero except for rounding (docs/step.md): Adam would make a full
    step of it.
    """

    embed: GroupConfig = GroupConfig(peak_rate=0.2, beta2=0.995)
    """The token embedding."""
    matrices: MatricesConfig = MatricesConfig(peak_rate=0.002, weight_decay=0.1)
    """Every matrix of the blocks; the only group of the plain network with weight decay by default."""
    lm_head: GroupConfig = GroupConfig(peak_rate=0.004, beta2=0.96)
    """The head."""
    scalars: GroupConfig = GroupConfig(peak_rate=0.2, eps=1e-4)
    """The few parameters of `model.smear` and `model.backout`."""
    value_embeds: GroupConfig = GroupConfig(peak_rate=0.1, beta2=0.995, weight_decay=0.01)
    """Tables of `model.value_embeddings`."""
    resid_lambdas: GroupConfig = GroupConfig(peak_rate=0.005, eps=1e-4, weight_decay=0.05)
    """`model.resid_lambdas`."""
    x0_lambdas: X0LambdasConfig = X0LambdasConfig(peak_rate=0.5, beta1=0.96, eps=1e-4)
    """`model.x0_lambdas`."""
    muon: MuonConfig = MuonConfig()
    """Muon's options, with `optimizer.matrices.kind=muon`."""
    rate_factor: Positive[float] = 1.0
    """Factor of every group's rate. Try 0.1 with `init_from` on new text (docs/recipe.md)."""
    batch_factor: InFile[Free[Positive[float]]] = 1.0
    """Factor that the peak rates have for the size of a step, as configs/nanochat.py derives them. It changes nothing
    here; configs/chat.py starts from the rates without it."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Schedule of every group's rate."""
    clip_norm: Positive[float] = 1.0
    """Bound on the global norm of the gradient, after its division by the step's valid tokens."""


@dataclass(frozen=True)
class MeshConfig:
    """The devices' arrangement."""

    data: Annotated[int, Meta(ge=-1)] = -1
    """Replicas. Each computes its share of every micro-batch's rows and keeps its share of the optimizer state.
    Gradients cross this axis once per step. -1: all devices that `fsdp` and `tensor` leave."""
    fsdp: Positive[int] = 1
    """Devices that share a replica's rows and parameters (arXiv:2304.11277); each matrix is gathered at each use. Must
    divide the width."""
    tensor: Positive[int] = 1
    """Devices that share heads, MLP width and vocabulary (arXiv:1909.08053). Must divide each of them."""


DATA_AXES = ("data_across", "data_major", "data_minor")
"""The axes of JAX's mesh that make up `data`: between slices or nodes, and two inside one (training/mesh.py)."""
BATCH_AXES = (*DATA_AXES, "fsdp")
"""The axes of JAX's mesh that the rows of a batch are divided over."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints. One is always saved at the end, on Ctrl-C, and on SIGTERM."""

    every_steps: Free[Positive[int]] = 250
    """Steps between checkpoints, written while training continues."""
    keep: Free[Positive[int]] = 2
    """Number of newest checkpoints to keep; the best by val_bpb (reinforce.py: by pass@1) is kept too."""
    keep_every: Free[NotNegative[int]] = 0
    """Also keep checkpoints of steps that are multiples of this. 0: none."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out text. One always follows the last step."""

    every_steps: Positive[int] = 250
    """Steps between evaluations."""
    tokens: Positive[int] = 10_485_760
    """Tokens of the fixed held-out set, in rows spread evenly over the validation part; all of it if it has fewer."""
    prompts: tuple[str, ...] = ("", "", "")
    """Prompts to continue after each evaluation; an empty one becomes the first words of a held-out document."""
    sample_tokens: InFile[Positive[int]] = 64
    """Tokens of each continuation, at most as many as the row has room for."""
    tasks: Literal["", "core", "chatcore", "chatcore4"] = ""
    """A benchmark after each evaluation: `core`, or `chatcore` for conversations; `chatcore4` is the latter without its
    programs (docs/evaluation.md). Empty: none."""
    run_code: Free[bool] = False
    """Let `chatcore` run the programs that the network writes, in processes with limits against accidents."""
    bundle: FilePath = ""
    """Folder of the benchmark's items, as for evaluate.py."""
    items: InFile[Annotated[int, Meta(ge=2)]] = 100
    """Items of each task, always the same; evaluate.py takes all by default."""


@dataclass(frozen=True)
class ReinforceConfig:
    """Reinforcement, by reinforce.py alone: a step's questions, and the answers that the network draws."""

    task: Literal["sums", "gsm8k"] = "sums"
    """`sums`: additions asked in words. `gsm8k`: GSM8K, from ChatCORE's bundle."""
    difficulty: Annotated[int, Meta(ge=1, le=6)] = 2
    """Most digits of a number in `sums`."""
    samples: Annotated[int, Meta(ge=2)] = 16
    """Answers to each question, whose mean reward is the baseline."""
    prompts: InFile[Positive[int]] = 8
    """Questions of a step."""
    temperature: InFile[Positive[float]] = 1.0
    """Temperature of the draws. At 1 they follow the network's own probabilities, whose gradient the step takes."""
    tokens: InFile[NotNegative[int]] = 0
    """Most tokens of a question with its answer. 0: the task's own."""
    held_out: InFile[Positive[int]] = 128
    """Held-out questions of an evaluation."""


@dataclass(frozen=True)
class LogConfig:
    """Reporting."""

    every_steps: Positive[int] = 10
    """Steps between lines of metrics.jsonl and points in TensorBoard."""
    on_event: str = ""
    """A command for the shell, started on the first process at a jump of the loss, a failure and the end.
    TOKENSUM_EVENT (`spike`, `failure`, `end`), TOKENSUM_MESSAGE, TOKENSUM_STEP, TOKENSUM_RUN and TOKENSUM_RUN_DIR
    describe the event. It runs in the background; its failure does not stop training. config.json records the command
    unchanged, so take secrets from the environment (`curl -d "$TOKENSUM_MESSAGE" "$HOOK"`)."""
    wandb: str = ""
    """PROJECT or ENTITY/PROJECT of Weights & Biases (`pip install wandb`), which also gets the numbers. The key comes
    from WANDB_API_KEY or `wandb login`. Empty: nothing is sent."""


@dataclass(frozen=True)
class DiagnosticsConfig:
    """Measurements within a step (docs/planning.md): the gradient noise scale, the agreement of micro-batches, and
    norms of gradients, parameters and updates."""

    every_steps: NotNegative[int] = 0
    """Steps between measured steps; 0: none. A second program is compiled for them; the result stays the same."""


@dataclass(frozen=True)
class HangConfig:
    """Limits after which a run counts as hung. It then prints every thread's stack and exits with code 42: start
    again."""

    seconds: NotNegative[int] = 600
    """Least limit in seconds for a step and the wait for its batch; the limit is ten times the median step if that is
    more. The first step of a process has six times as long. 0: no limit. Choose more than any step, and any stall of a
    disk or network that passes."""
    io_seconds: InFile[NotNegative[float]] = 7200.0
    """Limit in seconds for a restore, a save, an evaluation, or the end of a process; 0: none. Choose more than the
    longest of them."""


@dataclass(frozen=True)
class ProfileConfig:
    """A trace of the devices and the host, for TensorBoard, XProf or Perfetto."""

    steps: str = ""
    """FIRST:LAST, as 10:15: trace these steps on the first process, into profile/ in the run's folder. Avoid the first
    steps of a process, which take longer. Empty: none."""


@dataclass(frozen=True)
class Config:
    """One run."""

    name: Free[str]
    """The run's name; its folder is `runs/<name>` unless `run_dir` says otherwise."""
    run_dir: Free[AnyPath] = ""
    """The run's folder, with everything of the run, on a disk or in a bucket (`gs://BUCKET/RUN`). The same command
    again continues the run in it, on any machine that reaches it."""
    seed: NotNegative[int] = 0
    """Seed of the initial parameters, the order of rows and the samples."""
    steps: NotNegative[int] = 1000
    """Optimizer steps of the complete run. 0: `epochs` give the number."""
    epochs: Positive[float] = 1.0
    """With `steps=0`: epochs of the run, rounded down to a step. An epoch has as many rows as all datasets of
    `data.source`. On the command line, `--epochs` implies `--steps=0`."""
    ratio: Free[Positive[float] | None] = None
    """Tokens for each parameter of blocks and head. They give the `steps` of configs/nanochat.py alone, and no rate."""
    deterministic: Free[bool] = True
    """On GPUs, use no kernel whose order of additions varies, and choose kernels without timing them. A resumed run
    then ends with the same bits (docs/checkpoints.md). False: use the fastest kernels. On CPUs and TPUs it changes
    nothing."""
    init_from: AnyPath = ""
    """Another run: start from its parameters. `python -m interchange.convert` makes a run of a network in another
    format."""
    init_optimizer: bool = False
    """Also start from the optimizer's moments of the run in `init_from`. Steps and schedule start at 0."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: Free[MeshConfig] = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: Free[EvalConfig] = field(default_factory=EvalConfig)
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)
    log: Free[LogConfig] = field(default_factory=LogConfig)
    diagnostics: Free[DiagnosticsConfig] = field(default_factory=DiagnosticsConfig)
    hang: Free[HangConfig] = field(default_factory=HangConfig)
    profile: Free[ProfileConfig] = field(default_factory=ProfileConfig)


# Options of the runs that a command makes to measure a recipe, whatever the recipe's own are.
MEASURED: dict[str, object] = {"checkpoint.keep": 1, "checkpoint.keep_every": 0, "profile.steps": ""}
MEASURED |= {"log.on_event": "", "log.wandb": ""}


def options(config: object, prefix: str = "") -> dict[str, object]:
    """Return every option by its command-line name: `{"steps": 1000, "model.depth": 12, ...}`."""
    flat: dict[str, object] = {}
    for f in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, f.name)
        nested = dataclasses.is_dataclass(value)
        flat |= options(value, f"{prefix}{f.name}.") if nested else {prefix + f.name: value}
    return flat


@cache
def hints(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """Return the type of every option by its command-line name; a section's roles are those of all its options."""
    flat: dict[str, Any] = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        inner = hints(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else {prefix + name: kind}
        flat |= {
            option: reduce(lambda kind, extra: Annotated[kind, extra], extras, kind) for option, kind in inner.items()
        }
    return flat


def roles(section: type = Config) -> dict[str, set[Role]]:
    """Return the roles of every option by its command-line name."""
    extras = {name: getattr(hint, "__metadata__", ()) for name, hint in hints(section).items()}
    return {name: {extra for extra in of if isinstance(extra, Role)} for name, of in extras.items()}


def free_to_change(name: str) -> bool:
    """Return whether an option may differ when a run is resumed. A name that is not an option may not."""
    return Role.FREE in roles().get(name, ())


def with_options(config: T, values: Mapping[str, object]) -> T:
    """Return the config with other values, by their command-line names."""
    for name, value in values.items():
        first, _, rest = name.partition(".")
        value = with_options(getattr(config, first), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{first: value})  # pyright: ignore[reportArgumentType]
    return config
