"""Recipes that bench.compare pairs: a config each, trained by train.py with one seed after the other."""

import hashlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from configs.command_line import Exit, parse
from configs.files import cache_dir
from configs.schema import MEASURED, Config, DataConfig, UserError, free_to_change, options
from configs.validation import require_steps
from data.dataset import absolute
from data.dataset_folder import open_dataset
from data.mixture import read_source
from evaluation.results import write_json
from hosts.preflight import ROOT, code_digest
from hosts.runtime import versions

POINTS = 10  # of a curve of validation, after the one before step 0
OWN = [f"--{name}={value}" for name, value in MEASURED.items()]

Bits = dict[str, tuple[float, int]]
"""Bits and bytes by document."""


@dataclass(frozen=True)
class Recipe:
    """A config file, maybe with options, and the folder of its runs."""

    text: str
    """As given: `configs/small.py --model.depth=3`."""
    config: Config
    out: Path

    @property
    def facts(self) -> dict[str, object]:
        """Return the options that a pair must share: text, rows, and tokens of training and of evaluation. `stream` and
        `best_fit` lose no text, so they can be paired."""
        every = options(replace(self.config, data=absolute(self.config.data)))
        text = [name for name in every if name.startswith("data.") and not free_to_change(name)]
        text += ["data.source", "data.tokenizer", "model.vocab_size", "batch.sequence_length", "eval.tokens"]
        facts = {name: every[name] for name in text}
        if self.config.data.packing != "whole":
            facts["data.packing"] = "stream or best_fit"
        return facts | {"tokens of the run": self.config.steps * self.config.batch.tokens_per_step}

    @cached_property
    def digest(self) -> str:
        """Return a digest of all options, the code and the versions."""
        every = options(self.config).items()
        return made_with(sorted((name, value) for name, value in every if name not in ("name", "run_dir", "seed")))

    def run_dir(self, seed: int) -> Path:
        """Return the folder of a run. Its name has the digest, so another recipe or code has another folder."""
        readable = re.sub(r"[^\w.=-]+", "_", self.text.replace(".py", "").replace(" --", " ").removeprefix("configs/"))
        return self.out / f"{readable[-60:]}-{self.digest}-{seed}"

    def training(self, seed: int) -> list[str]:
        """Return the command that trains with a seed, or resumes."""
        file, *words = shlex.split(self.text)
        folder, every = self.run_dir(seed), max(1, self.config.steps // POINTS)
        own = [f"--run_dir={folder}", f"--name={folder.name}", f"--seed={seed}", f"--eval.every_steps={every}"]
        return ["train.py", f"--config={file}", *words, *OWN, *own]

    def documents(self, seed: int, most: int) -> tuple[Bits, Bits]:
        """Return the bits and bytes of up to `most` held-out documents under a trained network, and of their first
        rows. Both are empty unless they were evaluated."""
        logs = (self.run_dir(seed) / f"documents-{most}").glob("texts/*/documents.jsonl")
        lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()[1:]]
        names = [f"{line['source']} {line['document']}" for line in lines]
        complete = [(line["bits"], line["bytes"]) for line in lines]
        first_rows = [(sum(line["bits_by_octave"]), sum(line["bytes_by_octave"])) for line in lines]
        return dict(zip(names, complete)), dict(zip(names, first_rows))


def train_all(runs: Sequence[tuple[Recipe, int]], at_once: int) -> list[Path]:
    """Train recipes with seeds, up to `at_once` runs side by side, or resume, unless they are complete. Return their
    folders. Exit with train.py's code if one does not end well. machine.json records where a run that was not
    interrupted ran, and with how many others."""
    folders = [recipe.run_dir(seed) for recipe, seed in runs]
    training = {folder: recipe.training(seed) for folder, (recipe, seed) in zip(folders, runs)}
    commands = {folder: words for folder, words in training.items() if not (folder / "summary.json").exists()}
    resumed = {folder for folder in commands if (folder / "events.jsonl").exists()}
    machine = {"machine": platform.node(), "side_by_side": min(at_once, len(commands))}

    def completed(folder: Path) -> None:
        if folder not in resumed:
            write_json(folder / "machine.json", machine)
        print(f"complete: {folder.name}", flush=True)

    _run(commands, at_once, completed)
    return folders


def evaluate_all(runs: Sequence[tuple[Recipe, int]], most: int, at_once: int) -> None:
    """Evaluate trained networks on up to `most` held-out documents, unless that is done. Exit as `train_all` does."""
    commands = {}
    for recipe, seed in runs:
        folder = recipe.run_dir(seed)
        out = folder / f"documents-{most}"
        if list(out.glob("texts/*/bits_per_byte.json")):
            continue
        if source := most and dataset_folder(recipe.config.data, recipe.config.model.vocab_size):
            own = [f"--run_dir={folder}", f"--source={source}", f"--documents={most}", f"--out={out}"]
            commands[folder] = ["evaluate.py", *own]
    _run(commands, at_once)


def made_with(facts: object) -> str:
    """Return a digest of facts, the code and the versions, for the folder of runs."""
    return hashlib.sha256(repr((code_digest(), facts, versions())).encode()).hexdigest()[:12]


@cache
def dataset_folder(data: DataConfig, vocab_size: int) -> str:
    """Return the folder of the one dataset whose documents count. Otherwise print the reason, and return ""."""
    names, _ = read_source(data.source)
    if why := "a mixture" if len(names) > 1 else "at a URL" if "://" in names[0] else "":
        print(f"no documents are compared, since the text is {why}", flush=True)
        return ""
    dataset = open_dataset(names[0], data, vocab_size, cache_dir())
    if dataset.conversations:
        print("no documents are compared, since the text is conversations", flush=True)
        return ""
    return str(dataset.folder.absolute())


def make_writable(out: Path) -> None:
    """Make the folder of the runs. Raise UserError if nothing can be written to it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()
    except OSError as error:
        raise UserError(f"--out={out} cannot be written: {error.strerror}") from error


def read_recipe(text: str, out: Path) -> Recipe:
    """Return the recipe, with the options of MEASURED. Raise UserError, before anything runs, if it is not valid. A
    wrong option exits with code 2."""
    try:
        file, *words = shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"{text!r} is not a config with options ({error}); give FILE or 'FILE --OPTION=VALUE'"
        ) from error
    config, _ = parse("A recipe: a config file with options.", argv=[f"--config={file}", *words, *OWN])
    require_steps(config)
    return Recipe(text, config, out)


def read_recipes(texts: tuple[str, ...], out: Path) -> list[Recipe]:
    """Return the recipes, with the options of MEASURED. Raise UserError, before anything runs, for a recipe that is not
    valid, or that cannot be paired with the first one. A wrong option exits with code 2."""
    if len(texts) < 2:
        raise UserError('give two recipes or more: configs/small.py "configs/small.py --model.depth=3"')
    recipes = [read_recipe(text, out) for text in texts]
    facts = recipes[0].facts
    for other in recipes[1:]:
        theirs = other.facts
        names = [name for name in facts if facts[name] != theirs[name]]
        if different := "".join(f"\n  {name}: {facts[name]}, and {theirs[name]}" for name in names):
            raise UserError(
                f"{texts[0]} and {other.text} cannot be paired, since their text or tokens differ; give both the same:"
                f"{different}"
            )
    if len({recipe.digest for recipe in recipes}) < len(recipes):
        raise UserError("two recipes are the same: their runs would be, too")
    return recipes


def require_rows(recipes: Sequence[Recipe], at_once: int) -> None:
    """Raise UserError if recipes that run side by side would each take all of the memory."""
    auto = [recipe.text for recipe in recipes if recipe.config.batch.rows_per_device == "auto"]
    if auto and at_once > 1:
        raise UserError(
            f"--at_once={at_once} needs a number of rows, but {auto[0]} takes what all of the memory holds; "
            "give --batch.rows_per_device=8, for example"
        )


def why_seconds_differ(folders: list[Path]) -> str:
    """Return why the runs' seconds are not comparable, with a folder's name, or an empty text."""
    records = {folder.name: folder / "machine.json" for folder in folders}
    if resumed := [name for name, record in records.items() if not record.exists()]:
        return f"{resumed[0]} was interrupted"
    facts = {name: json.loads(record.read_text()) for name, record in records.items()}
    if shared := [name for name, fact in facts.items() if fact["side_by_side"] > 1]:
        return f"{shared[0]} ran side by side with others"
    first, *_ = facts
    if others := [name for name, fact in facts.items() if fact["machine"] != facts[first]["machine"]]:
        return f"{others[0]} is of another machine than {first}"
    return ""


def _run(
    commands: dict[Path, list[str]], at_once: int, completed: Callable[[Path], None] = lambda folder: None
) -> None:
    """Run a command for each folder as `run_programs` does, with its output in FOLDER.log. Exit with the code of the
    first that fails."""
    folders = list(commands)
    logs = [folder.with_name(f"{folder.name}.log") for folder in folders]
    with ExitStack() as files:
        outputs = [files.enter_context(log.open("a")) for log in logs]
        codes = run_programs([*commands.values()], outputs, at_once, lambda i: completed(folders[i]))
    for i, code in codes.items():
        if code != Exit.COMPLETE:
            words, name, tail = commands[folders[i]], folders[i].name, logs[i].read_text(errors="replace")[-1500:]
            print(f"{tail}\n{words[0]} ended with exit code {code} in {name}; all of it: {logs[i]}", file=sys.stderr)
            raise SystemExit(code)


def run_programs(
    commands: Sequence[list[str]],
    outputs: Sequence[TextIO],
    at_once: int = 1,
    completed: Callable[[int], None] = lambda i: None,
) -> dict[int, int]:
    """Run commands of this repository, up to `at_once` side by side, with their outputs in files. Return exit codes by
    the command's number, in the order of their ends; a signal's as a shell reports it.

    Call `completed` with the number after a code of 0. The first other code, SIGTERM and a terminal's Ctrl-C end all
    commands, which save. Exit if these two were for this one.
    """
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if at_once > 1 else {}  # they share a GPU's memory
    waiting, asked, codes = deque(range(len(commands))), [], {}
    running: dict[int, subprocess.Popen] = {}
    catch = lambda number, _: asked.append(number)
    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    terminated = False
    try:
        while running or waiting:
            failed = any(codes.values())
            if asked or failed:
                waiting.clear()
            # A terminal's Ctrl-C has reached the commands: a SIGTERM as well could interrupt their saving.
            if not terminated and (signal.SIGTERM in asked or (failed and not asked)):
                terminated = True
                for child in running.values():
                    child.terminate()
            while waiting and len(running) < at_once:
                i = waiting.popleft()
                words = [sys.executable, ROOT / commands[i][0], *commands[i][1:]]
                env = own | os.environ
                running[i] = subprocess.Popen(words, stdout=outputs[i], stderr=subprocess.STDOUT, env=env)
            for i, child in list(running.items()):
                if (code := child.poll()) is not None:
                    del running[i]
                    codes[i] = code if code >= 0 else 128 - code
                    if not code:
                        completed(i)
            time.sleep(0.05)
    finally:
        for child in running.values():  # after an exception
            child.terminate()
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked and not any(codes.values()):
        raise SystemExit(128 + asked[0])
    return codes
