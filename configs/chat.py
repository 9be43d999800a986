"""Fine-tunes a network on conversations, so that it answers.

python train.py --config=configs/chat.py --init_from=runs/small

The network's options, the length of a row, the tokenizer, the rates and the size of a step follow the run in
--init_from, and the optimizer starts from its moments. `python -m interchange.convert` makes a run of a published
nanochat or of nanochat's own checkpoints. Options on the command line stay as given.

The recipe is nanochat's chat_sft: 0.8 of pretraining's rates, no warmup (but a run's own of `x0_lambdas`), and a fall
to 0 over the last half. As there, the rates are those before the factor for a step's size (`optimizer.batch_factor`),
and the lambdas and scalars have their own again. Muon does not decay, and its momentum rises from 0.85 to 0.95.

After a run of small.py, an epoch of chat-stdlib is 172 steps. Validation loss falls from 6.61 to 2.04 nats per token of
an assistant, in one and a half to 1.90. That is 3.38 to 1.04 and 0.97 bits per byte, with a standard error of 0.05
(2026-11-28, Python 3.13, JAX 0.12.0.1, bfloat16, seed 0).
"""

from configs.schema import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    MatricesConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    options,
    with_options,
)
from run.base import base_of_chat, resumed_run
from system.errors import UserError

OF_BASE = ("model.", "batch.sequence_length", "batch.tokens_per_step", "optimizer.")
RECIPE = ("model.dropout", "optimizer.rate_factor", "optimizer.schedule.")
RECIPE += ("optimizer.muon.momentum", "optimizer.muon.weight_decay", "optimizer.batch_factor", "optimizer.scalars.")
RECIPE += ("optimizer.resid_lambdas.peak_rate", "optimizer.x0_lambdas.peak_rate")
SCALED = tuple(f"optimizer.{group}.peak_rate" for group in ("embed", "lm_head", "muon", "value_embeds"))


def get_config() -> Config:
    return Config(
        name="chat",
        steps=0,  # one epoch
        data=DataConfig(source="chat-stdlib", packing="whole", mask_documents=True),
        batch=BatchConfig(sequence_length=2048, tokens_per_step=524_288),
        optimizer=OptimizerConfig(
            matrices=MatricesConfig(0.002, kind="muon"),
            muon=MuonConfig(momentum=0.95, momentum_warmup_steps=300, momentum_final=0.95, weight_decay=0.0),
            rate_factor=0.8,
            schedule=ScheduleConfig(warmdown=0.5, final=0.0),
        ),
        checkpoint=CheckpointConfig(every_steps=100),
        eval=EvalConfig(every_steps=100, tokens=1_048_576, prompts=()),
    )


def derive(config: Config, given: set[str]) -> Config:
    """Return the config for the run in `init_from`. Raise UserError if it is empty or no run."""
    if not config.init_from:
        raise UserError(
            "--init_from is missing: configs/chat.py fine-tunes an existing network; --init_from=runs/small is the "
            "one from `make train`"
        )
    if "no_init_optimizer" in given:
        given = given | {"init_optimizer"}
    try:
        base = base_of_chat(config)
    except UserError:
        if resumed := resumed_run(config):  # its own record is enough
            return with_options(config, taken(resumed, (*OF_BASE, "init_optimizer", "data.tokenizer"), given))
        raise
    if "init_optimizer" not in given:
        config = with_options(config, {"init_optimizer": True})
    return following(with_options(config, {"data.tokenizer": base.data.tokenizer}), base, given)


def following(config: Config, base: Config, given: set[str]) -> Config:
    """Return the config with the options of `base` that it follows, except those `given`."""
    values = {name: value for name, value in taken(base, OF_BASE, given).items() if not name.startswith(RECIPE)}
    for name in SCALED:
        if isinstance(rate := values.get(name), float):
            values[name] = rate / base.optimizer.batch_factor
    if "optimizer.rate_factor" not in given:
        values["optimizer.rate_factor"] = config.optimizer.rate_factor * base.optimizer.rate_factor
    return with_options(config, values)


def taken(base: Config, names: tuple[str, ...], given: set[str]) -> dict[str, object]:
    """Return the options of `base` that begin with `names`, but for those that are `given`."""
    left = given | {"model.dtype", "model.remat", "model.loss_chunks"}  # they suit the machine
    return {name: value for name, value in options(base).items() if name.startswith(names) and name not in left}
