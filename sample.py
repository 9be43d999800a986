"""Continue a text with a trained network: python sample.py --run_dir=runs/small --prompt="def "."""

from dataclasses import dataclass
from pathlib import Path

import jax
import tyro

from configs.schema import MeshConfig, UserError
from data.tokenizer import load_tokenizer
from evaluation.generation import continuations, encode_prompts
from run.folder import load_run
from run.runtime import run_command, start_jax
from training.mesh import make_mesh
from training.state import compute_dtype, replicated, split_model


@dataclass(frozen=True)
class Arguments:
    """Continue a text with a trained network."""

    run_dir: str
    """Folder of the run whose newest checkpoint is used."""
    prompt: tuple[str, ...] = ("",)
    """Texts to continue, together in one batch; an empty one starts a document."""
    samples: int = 3
    """Continuations of each prompt."""
    tokens: int = 128
    """Most tokens of a continuation; with the prompt it must fit the network's sequence length. It ends where the
    network ends its document."""
    temperature: float = 0.8
    """0 takes the likeliest token; higher is more varied."""
    top_k: int = 50
    """Draw from this many likeliest tokens; 0 draws from all."""
    seed: int = 0
    """Seed of the draws."""


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__, use_underscores=True)
    if arguments.samples < 1 or arguments.tokens < 1 or arguments.temperature < 0 or arguments.top_k < 0:
        raise UserError("--samples and --tokens must be at least 1, --temperature and --top_k must not be negative")
    start_jax()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    run = load_run(arguments.run_dir, mesh)
    dtype = compute_dtype(run.config.model, jax.default_backend())
    capacity = run.config.batch.sequence_length
    tokenizer = load_tokenizer(Path(arguments.run_dir) / "tokenizer")
    prompts = [prompt for prompt in arguments.prompt for _ in range(arguments.samples)]
    texts = continuations(
        split_model(run.config.model, dtype)[0],
        replicated(run.params, dtype, mesh),
        tokenizer,
        encode_prompts(tokenizer, prompts, capacity),
        tokens=arguments.tokens,
        capacity=capacity,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    for i, text in enumerate(texts):
        print(f"--- {i + 1} of {len(texts)}, step {run.step}\n{text}")
    return 0


if __name__ == "__main__":
    run_command(main)
