"""nanochat's plain network under AdamW, layer by layer. transformers can load it.

Without `--model.depth` it is configs/small.py without the later features, of 3 M parameters: the baseline of
docs/recipe.md.

python train.py --config=configs/plain.py --model.depth=12 --data.source=FOLDER

With `--model.depth` it has nanochat's sizes at that depth, for accelerators: 135 M parameters at 12, 477 M at 20. A
tokenizer of 32,768 tokens is trained on your text. Options on the command line stay as given.
"""

from dataclasses import replace

from configs import small
from configs.nanochat import TOKENS_PER_PARAMETER, network_of_depth, scaling_parameters
from configs.schema import BatchConfig, Config, ModelConfig, OptimizerConfig, options, with_options


def get_config() -> Config:
    network = ModelConfig(depth=4, width=192, heads=4, kv_heads=4, head_dim=48, vocab_size=4096, loss_chunks=4)
    return replace(small.get_config(), name="plain", model=network, optimizer=OptimizerConfig())


def of_depth(depth: int) -> Config:
    """Return the plain network with nanochat's sizes at a depth."""
    config = Config(
        name=f"plain-d{depth}",
        model=network_of_depth(ModelConfig(), depth),
        batch=BatchConfig(sequence_length=2048, tokens_per_step=524_288),
    )
    return replace(config, steps=steps_of(config))


def steps_of(config: Config) -> int:
    """Return the steps of nanochat's horizon: tokens for each parameter of blocks and head."""
    return TOKENS_PER_PARAMETER * scaling_parameters(config.model) // config.batch.tokens_per_step


def derive(config: Config, given: set[str]) -> Config:
    """Return the config at the `given` depth, with the other options `given`."""
    if "model.depth" not in given or config.model.depth < 1:
        return config  # an invalid depth is refused later
    default = options(get_config())
    values = {name: value for name, value in options(config).items() if name in given or value != default[name]}
    config = with_options(of_depth(config.model.depth), values)
    if "steps" not in values and min(config.model.vocab_size, config.model.width, config.batch.tokens_per_step) > 0:
        config = replace(config, steps=steps_of(config))
    return config
