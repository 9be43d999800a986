"""A recipe to train: a config, maybe with options, or nanochat's own network and recipe on a config's batches."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from bench import nanochat
from bench.throughput import random_batch
from hosts.runtime import ROOT, code_digest, versions
from options.command_line import parse
from options.schema import MEASURED, Config, free_to_change, options
from options.validation import require_steps
from system.errors import UserError
from system.files import is_there
from training.build import build

OWN = tuple(f"--{name}={value}" for name, value in MEASURED.items())


class Recipe(NamedTuple):
    """What to train, and the folder of its runs."""

    text: str
    """As given: `configs/small.py --model.depth=3`, or `nanochat configs/small.py`."""
    config: Config
    out: Path
    words: tuple[str, ...]
    """The command's options."""
    options_of_nanochat: nanochat.Arguments | None = None
    """Options of nanochat's loop, if it trains."""

    def digest(self) -> str:
        """Return a digest of options, code and versions."""
        own = ("name", "run_dir", "seed")
        every = sorted((name, value) for name, value in options(self.config).items() if name not in own)
        facts = code_digest(), every, versions(), self.options_of_nanochat
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    def run_dir(self, seed: int) -> Path:
        """Return the folder of a run. Its name has the digest: other options and other code get another folder."""
        short = self.text.replace(".py", "").replace(" --", " ").replace("configs/", "")
        readable = re.sub(r"[^\w.=-]+", "_", short)
        return self.out / f"{readable[-60:]}-{self.digest()}-{seed}"

    def command(self, seed: int) -> list[str]:
        """Return the command of a run."""
        folder = self.run_dir(seed)
        program = ["-m", "bench.nanochat", f"--out={folder}"] if self.options_of_nanochat else [str(ROOT / "train.py")]
        own = [f"--run_dir={folder}", f"--name={folder.name}", f"--seed={seed}"]
        return [sys.executable, *program, *self.words, *own]

    def shared(self, equal: str) -> dict[str, object]:
        """Return the options that compared recipes must share: text, rows, tokens of evaluation and, unless seconds are
        equal, of training."""
        every = options(self.config)
        names = [name for name in every if name.startswith("data.") and not free_to_change(name)]
        names += ["data.source", "model.vocab_size", "batch.sequence_length", "eval.tokens"]
        tokens = self.config.steps * self.config.batch.tokens_per_step
        return {name: every[name] for name in names} | ({"tokens of the run": tokens} if equal == "tokens" else {})


def read_recipe(text: str, out: Path, own: tuple[str, ...] = ()) -> Recipe:
    """Return a recipe with the options `own`. Raise UserError if it is not valid."""
    try:
        file, *words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r} is not a config with options ({error})") from error
    by_nanochat = file == "nanochat" and bool(words)
    if by_nanochat:
        file, *words = words
    of_command = [f"--config={file}", *words, *OWN, *own]
    if by_nanochat:
        config, arguments = parse("nanochat's loop, on a config's batches.", nanochat.Arguments, of_command)
    else:
        config, arguments = parse("A recipe: a config file with options.", argv=of_command)[0], None
    require_steps(config)
    return Recipe(text, config, out, tuple(of_command), arguments)


def make_step(recipe: Recipe) -> Callable[[int], None]:
    """Return a function that takes a step of a recipe, with its number, on random tokens, and returns after it."""
    built = build(recipe.config)
    batch = random_batch(built)
    if recipe.options_of_nanochat:
        trainer = nanochat.Trainer(recipe.config, recipe.options_of_nanochat)

        def step_of_nanochat(number: int) -> None:
            trainer.step(number, dict(batch))
            trainer.wait()

        return step_of_nanochat
    state = built.create_state()
    compiled = built.train_step.lower(state, batch).compile()

    def step_of_ours(_: int) -> None:
        nonlocal state
        state, _ = jax.block_until_ready(compiled(state, batch))

    return step_of_ours


def train(recipe: Recipe, seed: int) -> float:
    """Train a recipe with a seed, unless that is done. An interrupted run resumes; nanochat's begins again. Return bits
    per byte of held-out text at the end. Exit with the command's code if it does not end well."""
    folder = recipe.run_dir(seed)
    if not is_there(folder / "summary.json"):
        if recipe.options_of_nanochat:
            shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        with log.open("a") as file:
            code = subprocess.run(recipe.command(seed), stdout=file, stderr=subprocess.STDOUT).returncode
        if code:
            print(f"{log.read_text(errors='replace')[-1500:]}\nthe run ended with {code}: {log}", file=sys.stderr)
            raise SystemExit(code)
    bits = json.loads((folder / "summary.json").read_text())["val_bpb"]
    if bits is None:
        raise UserError(f"{folder} has no finite bits per byte at its end; leave {recipe.text} out")
    print(f"{folder.name}: {bits:.4f} bits per byte", flush=True)
    return bits
