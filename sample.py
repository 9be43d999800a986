"""Continue a text with a trained network: python sample.py --run_dir=runs/small --prompt="def "."""

from dataclasses import dataclass

from configs.command_line import parse_arguments
from configs.schema import AnyPath, MeshConfig, NotNegative, Positive, UserError
from evaluation.generation import continuations, encode_prompts
from evaluation.network import open_network
from hosts.runtime import run_command, start_jax
from run.record import at_hand
from training.mesh import mesh_of_first


@dataclass(frozen=True)
class Arguments:
    """Continue a text with a trained network."""

    run_dir: AnyPath
    """Folder of the run whose newest checkpoint is used, here or at gs://."""
    step: Positive[int] | None = None
    """The checkpoint's step; default: the newest."""
    average: bool = True
    """Take the average of the run's parameters, if it has one (`optimizer.average`). False: the last ones."""
    prompt: tuple[str, ...] = ("",)
    """Texts to continue, together in one batch; an empty one starts a document."""
    samples: Positive[int] = 3
    """Continuations of each prompt."""
    tokens: Positive[int] | None = None
    """Most tokens of a continuation, which ends with the network's document. They must fit the network's sequence
    length together with the prompt. Default: 128, or as many as fit."""
    temperature: NotNegative[float] = 0.8
    """0 takes the likeliest token; higher is more varied."""
    top_k: NotNegative[int] = 50
    """Draw from this many likeliest tokens, and from all that are as likely as the last of them; 0 draws from all."""
    seed: NotNegative[int] = 0
    """Seed of the draws."""
    mesh: MeshConfig = MeshConfig(data=1)
    """Arrangement of this many of the devices here, whatever the run's own; `fsdp` and `tensor` for a network too large
    for one."""


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if not arguments.prompt:
        raise UserError("--prompt has no text; leave it out to start a document")
    start_jax()
    network = open_network(at_hand(arguments.run_dir), mesh_of_first(arguments.mesh), arguments.step, arguments.average)
    capacity = network.config.batch.sequence_length
    prompts = [prompt for prompt in arguments.prompt for _ in range(arguments.samples)]
    encoded = encode_prompts(network.tokenizer, prompts, capacity)
    room = capacity - max(map(len, encoded))
    if arguments.tokens and arguments.tokens > room:
        raise UserError(
            f"--tokens={arguments.tokens}: the network's sequence has {capacity} tokens, and the longest prompt leaves "
            f"room for {room}"
        )
    texts = continuations(
        network.generate(),
        network.params,
        network.tokenizer,
        encoded,
        tokens=arguments.tokens or min(128, room),
        capacity=capacity,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    for i, text in enumerate(texts):
        print(f"--- {i + 1} of {len(texts)}, {network.title}\n{text}")
    return 0


if __name__ == "__main__":
    run_command(main)
