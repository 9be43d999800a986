"""Continue a text with a trained network: python sample.py --run_dir=runs/small --prompt="def "."""

from dataclasses import dataclass

from options.arguments import SamplingArguments
from options.command_line import parse_arguments, refuse_mistakes
from options.schema import Positive
from system.errors import UserError


@dataclass(frozen=True)
class Arguments(SamplingArguments):
    """Continue a text with a trained network."""

    prompt: tuple[str, ...] = ("",)
    """Texts to continue, together in one batch; an empty one starts a document."""
    samples: Positive[int] = 3
    """Continuations of each prompt."""
    tokens: Positive[int] | None = None
    """Most tokens of a continuation, which ends with the network's document. They must fit the network's sequence
    length together with the prompt. Default: 128, or as many as fit."""


if __name__ == "__main__":
    refuse_mistakes(parse_arguments, __doc__, Arguments)  # before the imports, which take seconds

from data.prompts import encode_prompts
from generation.continuations import continuations
from generation.engine import Engine
from hosts.runtime import run_command, start_jax
from model.sampling import Sampling
from run.network import open_network
from training.mesh import mesh_of_first


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if not arguments.prompt:
        raise UserError("--prompt has no text; leave it out to start a document")
    start_jax()
    network = open_network(arguments.run_dir, mesh_of_first(arguments.mesh), arguments.step)
    capacity = network.config.batch.sequence_length
    prompts = [prompt for prompt in arguments.prompt for _ in range(arguments.samples)]
    encoded = encode_prompts(network.tokenizer, prompts, capacity)
    room = capacity - max(map(len, encoded))
    if arguments.tokens and arguments.tokens > room:
        raise UserError(
            f"--tokens={arguments.tokens}: the network's sequence has {capacity} tokens, and the longest prompt leaves "
            f"room for {room}"
        )
    sampling = Sampling(arguments.temperature, arguments.top_k, seed=arguments.seed)
    texts = continuations(Engine(network, len(encoded)), encoded, arguments.tokens or min(128, room), sampling)
    for i, text in enumerate(texts):
        print(f"--- {i + 1} of {len(texts)}, step {network.step}\n{text}")
    return 0


if __name__ == "__main__":
    run_command(main)
