"""A GPT of 5 M parameters on the Python standard library's own source: no download, no GPU, no argument."""

from configs.schema import BatchConfig, CheckpointConfig, Config, EvalConfig, ModelConfig


def get_config() -> Config:
    return Config(
        name="small",
        steps=300,
        model=ModelConfig(depth=4, width=256, heads=4, kv_heads=4, head_dim=64, vocab_size=4096, loss_chunks=4),
        batch=BatchConfig(sequence_length=256, tokens_per_step=4096, rows_per_device=8),
        checkpoint=CheckpointConfig(every_steps=100),
        eval=EvalConfig(every_steps=100, tokens=65_536, prompts=("def", "class", "import")),
    )
