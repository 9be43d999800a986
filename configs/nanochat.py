"""nanochat's recipe: everything follows from the depth.

python train.py --config=configs/nanochat.py --model.depth=12 --data.source=FOLDER

Network and recipe are nanochat's of mid 2026, all its later features and Muon included. Derived values are printed with
their reasons. Options on the command line stay as given, and values that depend on them follow. `--ratio=8` trains on 8
tokens for each parameter in place of 12, as nanochat's speedrun does about; rates and batch stay, as in nanochat.
"""

import math
from dataclasses import replace

from configs.schema import (
    BatchConfig,
    Config,
    DataConfig,
    MatricesConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    with_options,
)
from model.gpt import parameter_counts

TOKENS_PER_PARAMETER = 12
BATCH_EXPONENT = 0.383
DEFAULT = OptimizerConfig()
REFERENCE_DEPTH, REFERENCE_BATCH = 12, 2**19  # where nanochat tuned its rates


def get_config() -> Config:
    return Config(
        name="nanochat",
        ratio=TOKENS_PER_PARAMETER,
        model=ModelConfig(
            depth=20,
            qk_scale=1.2,
            window_pattern="SSSL",
            value_embeddings=True,
            resid_lambdas=True,
            x0_lambdas=True,
            smear=True,
            backout=True,
        ),
        data=DataConfig(packing="best_fit"),
        batch=BatchConfig(sequence_length=2048),
        optimizer=OptimizerConfig(
            embed=replace(DEFAULT.embed, peak_rate=0.3, weight_decay=0.001),
            lm_head=replace(DEFAULT.lm_head, peak_rate=0.008, weight_decay=0.01),
            matrices=MatricesConfig(0.002, kind="muon"),
            value_embeds=replace(DEFAULT.value_embeds, peak_rate=0.15),
            # nanochat has eps=1e-10 for resid_lambdas, x0_lambdas and scalars, too: see OptimizerConfig
            schedule=ScheduleConfig(warmup_steps=40),
            clip_norm=1e9,  # nanochat clips nothing
        ),
    )


def derive(config: Config, given: set[str]) -> Config:
    """Return the config with width, heads, horizon, batch size, rates and decay derived, except the options `given`."""

    def derived(values: dict[str, tuple[float, str]]) -> None:
        nonlocal config
        for name, (value, why) in values.items():
            if name not in given:
                config = with_options(config, {name: value})
                print(f"--{name}={value:g}  {why}" if isinstance(value, float) else f"--{name}={value}  {why}")

    depth = config.model.depth
    if min(depth, config.model.head_dim, config.model.vocab_size) < 1:
        return config  # invalid, and refused later
    network = network_of_depth(config.model, depth)
    derived(
        {
            "model.width": (network.width, f"64 x depth {depth}, up to whole heads of {network.head_dim}"),
            "model.heads": (network.heads, "width / head_dim"),
            "model.kv_heads": (network.kv_heads, "no groups"),
        }
    )
    tokens = TOKENS_PER_PARAMETER * scaling_parameters(config.model)
    reference = TOKENS_PER_PARAMETER * scaling_parameters(network_of_depth(config.model, REFERENCE_DEPTH))
    batch = batch_for(tokens, reference)
    why = f"2^19 x ({tokens / reference:.3f} of d12's horizon)^{BATCH_EXPONENT}, to a power of 2"
    derived({"batch.tokens_per_step": (batch, why)})
    batch = config.batch.tokens_per_step
    ratio = config.ratio or TOKENS_PER_PARAMETER
    trained = int(ratio * scaling_parameters(config.model))
    per_parameter = f"{ratio:g} tokens for each of {scaling_parameters(config.model):,} parameters"
    derived({"steps": (trained // batch, f"{trained:,} tokens: {per_parameter} of blocks and head")})
    scale = math.sqrt(batch / REFERENCE_BATCH)
    why = f"nanochat's, x sqrt(tokens_per_step / 2^19) = {scale:.3f}"
    groups = ("embed", "lm_head", "muon", "value_embeds", "resid_lambdas", "x0_lambdas")
    derived({f"optimizer.{of}.peak_rate": (getattr(config.optimizer, of).peak_rate * scale, why) for of in groups})
    config = with_options(config, {"optimizer.batch_factor": scale})
    decay = config.optimizer.muon.weight_decay * scale * reference / tokens
    why = f"nanochat's, x {scale:.3f} x d12's horizon over this one (arXiv:2405.13698)"
    derived({"optimizer.muon.weight_decay": (decay, why)})
    return config if "name" in given else with_options(config, {"name": f"nanochat-d{depth}"})


def batch_for(tokens: int, reference: int) -> int:
    """Return the tokens of a step for a horizon, from `reference`, the horizon of depth 12."""
    return 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference) ** BATCH_EXPONENT))


def network_of_depth(model: ModelConfig, depth: int) -> ModelConfig:
    heads = math.ceil(64 * depth / model.head_dim)
    sizes = {"depth": depth, "width": heads * model.head_dim, "heads": heads, "kv_heads": heads}
    return with_options(model, sizes)


def scaling_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of blocks and head, which nanochat's horizon counts."""
    counts = parameter_counts(replace(model, window_pattern="L"))  # windows add no parameters
    return counts["matrices"] + counts["lm_head"]
