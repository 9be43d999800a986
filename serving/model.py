"""What a page says of the model that it talks to."""

from typing import NamedTuple

from data.dataset import read_source, shortest
from model.gpt import parameter_counts
from options.schema import Config

OF_STDLIB = ("What does os.getcwd do?", "Hello! What can you tell me?", "What is json.dumps for?")
OF_OTHERS = ("Hello! Who are you?", "What can you tell me?", "Give me an example.")
TO_CONTINUE = ("def main():", "import os", "The capital of France is")


class Model(NamedTuple):
    """A model by name, a line about it, and three messages, or texts to continue, to begin with."""

    name: str
    about: str = ""
    examples: tuple[str, ...] = ()
    converses: bool = True
    """False if it was trained on texts alone: it continues them."""


def size_of(config: Config) -> str:
    """Return the number of parameters of a run's network, in words."""
    return f"{sum(parameter_counts(config.model).values()) / 1e6:.1f} M parameters"


def model_of(config: Config, name: str, dataset: str, converses: bool) -> Model:
    """Return what is known of a run's network. `dataset`: the fingerprint of its text, empty if it was converted."""
    about = size_of(config)
    if config.data.source == "chat-stdlib":
        return Model(name, f"{about}, trained on conversations about Python's standard library", OF_STDLIB)
    if dataset:
        about += f", trained on {', '.join(shortest(read_source(config.data.source)[0]))}"
    if not converses:
        return Model(name, f"{about}. It continues texts: each message is one.", TO_CONTINUE, converses=False)
    return Model(name, about, OF_OTHERS)
