"""Talk to a network that was fine-tuned on conversations: python chat.py --run_dir=runs/chat."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options.arguments import SamplingArguments
from options.command_line import parse_arguments, refuse_mistakes
from options.schema import NotNegative, Positive
from system.errors import UserError


@dataclass(frozen=True)
class Arguments(SamplingArguments):
    """Talk to a network that was fine-tuned on conversations."""

    seed: NotNegative[int] = 0
    """Seed of the draws. `/regenerate` takes the next one."""
    prompt: str = ""
    """A message to answer, and nothing else. Without it, messages come from the terminal, a line each."""
    system: str = ""
    """A system message: it goes before the first message."""
    tokens: Positive[int] | None = None
    """Most tokens of an answer. Default: as many as the row has room for."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Draw from the fewest likeliest tokens that have this probability together."""
    serve: bool = False
    """Answer over HTTP: a page to chat on, and OpenAI's API (docs/chat.md). Requests without a temperature, top_k or
    top_p use the options above. If the environment variable TOKENSUM_API_KEY is set, programs must send it."""
    host: str = "127.0.0.1"
    """Address of the server. The default admits only this machine."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may be for, besides localhost, this machine's and --host: those of a proxy or a tunnel, as
    chat.example.com; `*.example.com` stands for all below it, `*` for any."""
    port: NotNegative[int] = 8000
    """Port of the server; 0 takes a free one."""
    slots: Positive[int] = 4
    """Answers that the server writes at once."""
    queue: NotNegative[int] = 16
    """Most requests that wait for a slot. More are refused."""


if __name__ == "__main__":
    refuse_mistakes(parse_arguments, __doc__, Arguments)  # before the imports, which take seconds

import jax

from data.conversation import require_chat_tokens
from generation.engine import Engine
from hosts.runtime import run_command, start_jax
from interchange.folders import converses
from model.sampling import Sampling
from run.folder import folder_to_read
from run.network import Network, open_network
from serving.access import require_names
from serving.batcher import Batcher
from serving.model import model_of, size_of
from serving.server import Access, Service, listener, serve
from serving.terminal import Terminal, note
from training.mesh import mesh_of_first


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if arguments.serve and (arguments.prompt or arguments.system or arguments.tokens or arguments.seed):
        raise UserError("--serve takes no --prompt, --system, --tokens or --seed: each request has its own")
    require_names(arguments.allowed_hosts)
    address = listener(arguments.host, arguments.port) if arguments.serve else None
    start_jax()
    network = open_network(arguments.run_dir, mesh_of_first(arguments.mesh), arguments.step)
    if not address:
        require_chat_tokens(network.tokenizer, arguments.run_dir)
    if not converses(network.config, network.tokenizer):
        tune = f"python train.py --config=configs/chat.py --init_from={arguments.run_dir}"
        note(f"{arguments.run_dir} was not fine-tuned on conversations; this does that: {tune}")
    engine = Engine(network, arguments.slots if address else 1)
    if not arguments.prompt:
        engine.compile()
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    if address:
        serve_network(network, engine, sampling, arguments, address)
        return 0
    terminal = Terminal(engine, sampling, arguments.system, arguments.tokens)
    if arguments.prompt:
        terminal.say(arguments.prompt)
        return 0
    note(
        f"{arguments.run_dir}, step {network.step}: {size_of(network.config)}, {network.sharded.dtype.name} on "
        f"{jax.default_backend()}; {engine.capacity} tokens a row, and beyond {terminal.limit} the oldest turns are "
        "left out; /help"
    )
    terminal.run()
    return 0


def serve_network(
    network: Network, engine: Engine, sampling: Sampling, arguments: Arguments, address: socket.socket
) -> None:
    """Serve the network until SIGTERM or Ctrl-C, and say where, and to whom."""
    access = Access((arguments.host, *arguments.allowed_hosts), os.environ.get("TOKENSUM_API_KEY", "").strip())
    host, port, *_ = address.getsockname()
    if not (access.key or ipaddress.ip_address(host).is_loopback):
        note("whoever reaches this server can use it: set TOKENSUM_API_KEY, and programs must send that key")
    note(f"{arguments.run_dir}, step {network.step}: http://{arguments.host}:{port}, until Ctrl-C")
    name = folder_to_read(arguments.run_dir).path.name
    model = model_of(network.config, name, network.dataset, converses(network.config, network.tokenizer))
    batcher = Batcher(engine, arguments.queue)
    serve(Service(batcher, network.tokenizer, model, sampling), access, address)


if __name__ == "__main__":
    run_command(main)
