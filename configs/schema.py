"""Every option of a run, on one page.

A config file (`configs/small.py`) defines `get_config() -> Config`; the command line overrides single fields of it
(`--batch.rows_per_device=16`). A field's type says which values it takes, and what a change of it changes;
configs/validation.py checks them. Those of type `InFile` are a config file's alone. Nothing here imports from the rest
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


class UserError(Exception):
    """A mistake the user can mend: every command prints the message, without a traceback, and ends with code 2."""


class Role(Enum):
    """What an option is for, if other modules need to know."""

    FREE = "speed, reporting, or a path whose content a fingerprint holds: it may differ when a run is continued"
    TRAINING = "how the network is trained: whatever it is, the network computes the same function"
    PATH = "a file or folder: ~ is the home folder; a URL is refused"
    STORE = "a path that may lead to a bucket, too: gs://BUCKET/FOLDER"
    FILE = "a config file alone sets it: it is no option of the command line"


SMEAR_CHANNELS, VALUE_GATE_CHANNELS = 24, 12  # of the residual stream, that gates read: nanochat's
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
    `mesh.tensor` divides them, or is a multiple: then devices share a head."""
    head_dim: Annotated[int, Meta(gt=0, multiple_of=2)] = 128
    """Channels of one head; even, since rotary positions turn pairs of channels."""
    vocab_size: Annotated[int, Meta(ge=MIN_VOCAB_SIZE)] = 32768
    """Tokens of the tokenizer, the BOS included."""
    softcap: Positive[float] = 15.0
    """Logits are capped to `softcap * tanh(logits / softcap)`. The loss has no maximum pass because of this bound. At
    most 88.7 - log(vocab_size): the loss sums exp(logit) over the vocabulary, and float32 overflows at exp(88.7)."""
    z_loss: OfTraining[NotNegative[float]] = 0.0
    """Factor of the squared log-sum-exp of the logits that training adds to the loss (arXiv:2204.02311). The logged
    `loss` is without it, as validation's; `z_loss` is what it adds."""
    loss_chunks: Free[Positive[int]] = 1
    """The head and the loss process a micro-batch's tokens in this many parts: only one part's logits exist. Less
    memory, more time, the same result. Must divide `batch.sequence_length`."""
    rotary_base: Positive[float] = 100_000.0
    """Base of the rotary wavelengths (arXiv:2104.09864)."""
    qk_scale: Positive[float] = 1.0
    """Factor of queries and of keys after their norm, to sharpen attention; 1.2 in nanochat's later networks."""
    window_pattern: str = "L"
    """Attention of block after block, repeated as often as it fits: L sees the whole row up to its position, S
    `short_window` tokens back (nanochat: SSSL). The last block is always L."""
    short_window: NotNegative[int] = 0
    """Tokens before its own that a position sees in S blocks. 0: a quarter of `batch.sequence_length`, rounded up to
    128."""
    value_embeddings: bool = False
    """Every other block, the last one included, adds to its values a vector a token, read from a table of its own and
    gated per head by the input (after arXiv:2410.17897)."""
    resid_lambdas: bool = False
    """A learned factor of the residual stream before each block."""
    x0_lambdas: bool = False
    """A learned share of the first embedding, added to the residual stream before each block."""
    smear: bool = False
    """Adds the embedding of the token before, gated."""
    backout: bool = False
    """Takes a learned share of the middle block's residual stream away before the head."""
    dtype: OfTraining[Literal["auto", "bfloat16", "float32"]] = "auto"
    """Type of activations and of the parameters' copy in a step. `auto`: bfloat16, but float32 on a CPU with JAX before
    0.12, where that is as fast. Parameters, gradients and moments are float32 whatever it is. `float32`: products are
    float32 on every platform, without TF32 or passes in bfloat16: some six times the work on a TPU."""
    remat: Free[Literal["none", "products", "block"]] = "none"
    """What a block keeps for its backward pass: everything; all but the MLP's hidden layer, for which one product of
    six is computed again; or its input alone. Less memory, more time, the same result."""


@dataclass(frozen=True)
class DataConfig:
    """The text, and how it becomes rows."""

    source: Free[str] = "stdlib"
    """A dataset folder that data.prepare made; a folder of .bin token shards (llm.c, modded-nanogpt), with `tokenizer`;
    either at a URL that fsspec reads (gs://BUCKET/FOLDER, s3://, hf://datasets/...);
    several of these with their shares of the rows (`0.7:DIR,0.3:DIR`), which may change once this many tokens of the
    run's data are seen (`0.9:DIR,0.1:DIR;from=8e9,0.4:DIR,0.6:DIR`); or raw text, prepared once in the cache:
    `stdlib` (this Python's standard library, its .py files), `chat-stdlib` (conversations made of it), or a file, a
    folder or a glob of .txt, .md, .py, .jsonl, .parquet, .csv and .arrow."""
    tokenizer: Free[str] = ""
    """A tokenizer.json, a folder with one, or `tiktoken:gpt2`. Empty: the dataset's own; for raw text a byte-level BPE
    of `model.vocab_size` tokens is trained."""
    val_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Of raw text: the share of the documents, chosen by a hash of their texts, that is never trained on."""
    max_epochs: Free[NotNegative[float]] = 0.0
    """Refuse to start a run that would go through the rows of a source more often than this; 0: it may."""
    packing: Packing = "stream"
    """`stream`: documents, each after a BOS, in one long stream that is cut into rows; nothing is padded or lost.
    `best_fit`: whole documents side by side, every row starting with a BOS; longer ones are cut into rows.
    `whole`: likewise, but no document is in two rows; conversations need this."""
    too_long: Literal["cut", "drop"] = "cut"
    """With `whole`, of a document longer than a row: train on its beginning, which fills the row, or leave it out."""
    mask_documents: bool = False
    """Attention stays within a document. On a GPU it then runs without cuDNN's kernel (docs/performance.md)."""
    workers: Free[NotNegative[int]] = 2
    """Threads that read batches ahead; from a URL 8 at least."""
    copy: Free[Literal["none", "all"]] = "none"
    """Of a dataset at a URL: `none`: rows are read from there, and up to 20 GB of what was read stay in this machine's
    cache; `all`: it is copied whole to this machine first."""


@dataclass(frozen=True)
class BatchConfig:
    """The sizes of a step. The number of micro-batches K follows from them and from the mesh."""

    sequence_length: Annotated[int, Meta(ge=2)] = 2048
    """Tokens of a row."""
    tokens_per_step: Positive[int] = 524_288
    """Tokens of one optimizer step, over all devices and micro-batches; with a `ramp`, those that the optimizer's
    options are given for."""
    rows_per_device: Free[Positive[int]] = 32
    """Rows of a micro-batch on one device: what fits its memory; it never changes the result. Where a whole step has
    fewer rows a device, the step is one micro-batch of those."""
    ramp: str = ""
    """A batch that grows, `0:65536,2e8:131072`: 65,536 tokens a step, and 131,072 once the run has seen 2e8. Each stage
    is a program, and all are compiled at the start (docs/batch-ramp.md). Empty: `tokens_per_step` all along."""
    ramp_scaling: Literal["none", "root", "linear"] = "none"
    """What follows a `ramp`: nothing; or rates, by the root of a stage's size over `tokens_per_step` or linearly, and
    second moments, which forget half in as many tokens as at `tokens_per_step` (arXiv:2507.07101)."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The course of every group's learning rate, as a factor of its peak rate."""

    kind: Literal["constant", "warmup_cosine", "warmup_constant_warmdown"] = "warmup_constant_warmdown"
    """After the warmup: stay; fall by a half cosine; or stay, and fall linearly over the last `warmdown` of the run."""
    warmup_steps: NotNegative[int] = 0
    """Steps of linear rise: step t has (t + 1) / warmup_steps of the peak. With `batch.ramp`, the tokens of as many."""
    warmdown: Share = 0.65
    """Share of the run's steps, with `batch.ramp` of its tokens, that fall (`warmup_constant_warmdown`)."""
    final: Share = 0.05
    """Factor that the falling schedules end at."""


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
    """Added to the root of the second moment."""
    weight_decay: NotNegative[float] = 0.0
    """Decoupled: a step takes `rate * weight_decay * parameter` away."""


@dataclass(frozen=True)
class X0LambdasConfig(GroupConfig):
    """`model.x0_lambdas`, whose rate is high."""

    warmup_steps: NotNegative[int] = 0
    """Steps of linear rise of this group's rate, if they are more than `optimizer.schedule.warmup_steps`."""


@dataclass(frozen=True)
class MatricesConfig(GroupConfig):
    """The matrices of the blocks."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: `optimizer.muon` holds for them, and this group's other options for none."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon for the matrices: momentum, orthogonalised (kellerjordan.github.io/posts/muon), as nanochat does it."""

    peak_rate: Positive[float] = 0.02
    """Learning rate that the schedule multiplies; a matrix with more outputs than inputs has it times the root of their
    ratio."""
    momentum: Decay = 0.97
    """Decay of the first moment (Nesterov), after its own warmup and until the rate's warmdown."""
    momentum_start: InFile[Decay] = 0.85
    """At step 0."""
    momentum_warmup_steps: InFile[NotNegative[int]] = 400
    """Steps of its linear rise. If the warmdown begins earlier, it falls from where it has risen to."""
    momentum_final: InFile[Decay] = 0.9
    """At the end of the warmdown."""
    beta2: InFile[Decay] = 0.9
    """Decay of the second moment of a matrix's rows or columns, which evens out the update (arXiv:2510.05491)."""
    weight_decay: NotNegative[float] = 0.28
    """Decoupled, only where it and the update agree (arXiv:2411.16085), and falling to 0 by a half cosine."""


@dataclass(frozen=True)
class OptimizerConfig:
    """One group for each kind of parameter: AdamW, and for the matrices Muon if asked for.

    `eps` is 1e-4 where the first gradient is zero but for rounding (docs/mesh.md): Adam would make a full step of it.
    """

    embed: GroupConfig = GroupConfig(peak_rate=0.2, beta2=0.995)
    """The token embedding."""
    matrices: MatricesConfig = MatricesConfig(peak_rate=0.002, weight_decay=0.1)
    """Every matrix of the blocks; the only group of the plain network that decays by default."""
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
    """The matrices', with `optimizer.matrices.kind=muon`."""
    rate_factor: Positive[float] = 1.0
    """Factor of every group's rate. With `init_from` on new text 0.1 is a start (docs/recipe.md)."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Course of every group's rate."""
    clip_norm: Positive[float] = 1.0
    """Bound on the global norm of the gradient, after its division by the step's valid tokens."""


@dataclass(frozen=True)
class MeshConfig:
    """The devices' arrangement."""

    data: Annotated[int, Meta(ge=-1)] = -1
    """Replicas. Each computes its share of every micro-batch's rows and keeps its share of the optimizer state;
    gradients cross this axis once a step. -1: all devices that `fsdp` and `tensor` leave."""
    fsdp: Positive[int] = 1
    """Devices that share a replica's rows and parameters (arXiv:2304.11277); each matrix is gathered where it is read.
    Must divide the width."""
    tensor: Positive[int] = 1
    """Devices that share heads, MLP width and vocabulary (arXiv:1909.08053). Must divide each of them."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run. A checkpoint is always saved at the end, on Ctrl-C, and on SIGTERM."""

    folder: AnyPath = ""
    """Where checkpoints go in place of the run's folder, with a copy of its record (config, metrics, events,
    tokenizer, TensorBoard, summary): a disk that outlives the machine, or `gs://BUCKET/FOLDER`. A machine without the
    run's folder continues from there, and sample.py and the like read a run there."""
    every_steps: Free[Positive[int]] = 250
    """Steps between checkpoints, written while training continues."""
    every_minutes: Free[NotNegative[float]] = 0.0
    """And a checkpoint once this many minutes have passed since the last one, checked when a step is logged;
    what a kill can cost then does not depend on the speed of steps. 0: only `every_steps`."""
    keep: Free[Positive[int]] = 2
    """Newest checkpoints kept; the best by val_bpb is kept too."""
    keep_every: Free[NotNegative[int]] = 0
    """Keep those of steps that are multiples of this, too; 0: none."""


@dataclass(frozen=True)
class StabilityConfig:
    """What happens when the loss jumps."""

    spike_factor: NotNegative[float] = 1.5
    """A step is reported if its loss is more than this many times the median of the 64 steps before it, with the rows
    it saw; 0: none is."""
    rollback: bool = False
    """Then go back to the newest checkpoint, and skip the batches from there up to that step's. On record in
    metrics.jsonl, and the same whenever the run is killed and continued. Three from one checkpoint end the run."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out text, always done once more at the end."""

    every_steps: Positive[int] = 250
    """Steps between evaluations."""
    tokens: Positive[int] = 10_485_760
    """Tokens of the fixed held-out set, in rows spread evenly over the validation part; all of it where it is less."""
    prompts: tuple[str, ...] = ("", "", "")
    """Texts that are continued after each evaluation; an empty one starts a document."""
    sample_tokens: Positive[int] = 64
    """Tokens of each continuation, or as many as the row has room for."""
    tasks: Literal["", "core"] = ""
    """Benchmarks, too: `core`, of the bundle that DCLM and nanochat use (docs/evaluation.md). Empty: none."""
    tasks_every_steps: Positive[int] = 2000
    """Steps between evaluations of `tasks`, always done once more at the end."""
    bundle: FilePath = ""
    """Folder of that bundle: core.yaml, eval_meta_data.csv and eval_data/."""
    items: Positive[int] = 500
    """Items of each task, always the same; evaluate.py takes all by default."""


@dataclass(frozen=True)
class LogConfig:
    """Reporting."""

    every_steps: Positive[int] = 10
    """Steps between lines of metrics.jsonl and points in TensorBoard."""
    on_event: str = ""
    """A command for the shell, started on the first process at a jump of the loss, a rollback, a failure and the end.
    TOKENSUM_EVENT (`spike`, `rollback`, `failure`, `end`), TOKENSUM_MESSAGE, TOKENSUM_STEP, TOKENSUM_RUN and
    TOKENSUM_RUN_DIR tell it which. The run neither waits for it nor fails of it. `python -m tools.launch tpu run`
    starts it too (docs/pods.md). config.json records it unchanged: let it take secrets from the environment
    (`curl -d "$TOKENSUM_MESSAGE" "$HOOK"`)."""
    wandb: str = ""
    """PROJECT or ENTITY/PROJECT of Weights & Biases (`pip install wandb`), which is sent the numbers too. Its key is
    taken from WANDB_API_KEY, or from where `wandb login` put it. Empty: nothing is sent."""


@dataclass(frozen=True)
class DiagnosticsConfig:
    """What a step measures of itself (docs/diagnostics.md): the gradient noise scale, whether micro-batches agree, and
    norms of gradients, parameters and updates."""

    every_steps: NotNegative[int] = 0
    """Steps between measured ones; 0: none is. A second program is compiled for them; the result stays the same."""


@dataclass(frozen=True)
class HangConfig:
    """When a step counts as hung. Then every thread's place is printed, and the run ends with code 42: start again."""

    seconds: NotNegative[int] = 600
    """Seconds that a step may take in any case, the wait for its batch included (the first of a process six times as
    long) and, if that is more, ten times the median step; 0: for ever. More than any step, any stall of a disk or of a
    network that passes by itself. While a store that the data are read from does not answer, no time counts."""
    other_seconds: NotNegative[float] = 7200.0
    """Seconds that a restore, a save or an evaluation may take; 0: for ever. More than the longest of them."""


@dataclass(frozen=True)
class ProfileConfig:
    """A trace of the devices and the host, for TensorBoard, XProf or Perfetto."""

    steps: str = ""
    """FIRST:LAST, as 10:15: a trace of these steps, of the first process, in the run's folder under profile/. Not the
    first steps of a process, which take longer. Empty: none."""


@dataclass(frozen=True)
class Config:
    """One run."""

    name: Free[str]
    """The run's name; its folder is `runs/<name>` unless `run_dir` says otherwise."""
    run_dir: Free[FilePath] = ""
    """The run's folder: checkpoints, metrics, config. The same command again continues the run in it."""
    seed: NotNegative[int] = 0
    """Seed of the initial parameters, of the order of rows and of the samples."""
    steps: NotNegative[int] = 1000
    """Optimizer steps of the whole run; with `batch.ramp` they differ in size, and the start says how many tokens they
    are in all. 0: one epoch, rounded up to a step: as many rows as the datasets of `data.source` have together."""
    deterministic: Free[bool] = True
    """On GPUs: no kernel that adds in an order of its own, and the kernels that XLA chooses by timing them are kept in
    the run's folder, so that a run that is continued ends with the same bits (docs/checkpoints.md). False: whatever is
    fastest. On CPUs and TPUs it changes nothing."""
    init_from: AnyPath = ""
    """Another run, a folder that export.py wrote, or a nanochat in transformers' format: start from its parameters. If
    its tokenizer lacks the tokens of conversations and the data's has them, rows for them are added."""
    init_optimizer: bool = False
    """Start from the optimizer's moments of the run in `init_from`, too. Steps and schedule start at 0."""
    resume: Free[Literal["auto", "never", "must"]] = "auto"
    """`auto`: continue the run in `run_dir` if there is one. `never`: refuse if there is one. `must`: refuse if not."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: Free[MeshConfig] = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    eval: Free[EvalConfig] = field(default_factory=EvalConfig)
    log: Free[LogConfig] = field(default_factory=LogConfig)
    diagnostics: Free[DiagnosticsConfig] = field(default_factory=DiagnosticsConfig)
    hang: Free[HangConfig] = field(default_factory=HangConfig)
    profile: Free[ProfileConfig] = field(default_factory=ProfileConfig)


def options(config: object, prefix: str = "") -> dict[str, object]:
    """Every option by its command-line name: `{"steps": 1000, "model.depth": 12, ...}`."""
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
    roles_in = lambda hint: {extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Role)}
    return {name: roles_in(hint) for name, hint in hints(section).items()}


def free_to_change(name: str) -> bool:
    """Whether an option may differ when a run is continued; whatever is no option may not."""
    return Role.FREE in roles().get(name, ())


def with_options(config: T, values: Mapping[str, object]) -> T:
    """Return the config with other values, by their command-line names."""
    for name, value in values.items():
        first, _, rest = name.partition(".")
        value = with_options(getattr(config, first), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{first: value})  # pyright: ignore[reportArgumentType]
    return config
