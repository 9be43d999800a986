"""Recipes that bench.compare pairs: a config each, trained by train.py with one seed after the other."""

import hashlib
import json
import os
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TextIO

from configs.command_line import parse
from configs.exit_codes import Exit
from configs.files import cache_dir
from configs.ramp import Ramp
from configs.schema import MEASURED, Config, DataConfig, UserError, free_to_change, options
from configs.validation import require_steps
from data.dataset import absolute
from data.dataset_folder import open_dataset
from data.mixture import read_source
from evaluation.item_log import write_json
from hosts.preflight import ROOT, code_digest
from hosts.runtime import versions

POINTS = 10  # of a curve of validation, after the one before step 0
OWN = [f"--{name}={value}" for name, value in MEASURED.items()]
BUSY = 0.05  # share of the processors that others may use during a run whose seconds are compared


@dataclass(frozen=True)
class Recipe:
    """A config file, maybe with options, and the folder of its runs."""

    text: str
    """As given: `configs/small.py --model.depth=3`."""
    config: Config
    out: Path

    @property
    def facts(self) -> dict[str, object]:
        """Return the options that a pair must share: text, rows, and tokens of training and of evaluation."""
        every = options(replace(self.config, data=absolute(self.config.data)))
        text = [name for name in every if name.startswith("data.") and not free_to_change(name)]
        text += ["data.source", "data.tokenizer", "model.vocab_size", "batch.sequence_length", "eval.tokens"]
        return {name: every[name] for name in text} | {
            "tokens of the run": Ramp.of(self.config.batch).tokens(self.config.steps)
        }

    @cached_property
    def digest(self) -> str:
        """Return a digest of all options, the code and the versions."""
        every = options(self.config).items()
        return made_with(sorted((name, value) for name, value in every if name not in ("name", "run_dir", "seed")))

    def run_dir(self, seed: int) -> Path:
        """Return the folder of a run. Its name has the digest, so another recipe or code has another folder."""
        readable = re.sub(r"[^\w.=-]+", "_", self.text.replace(".py", "").replace(" --", " ").removeprefix("configs/"))
        return self.out / f"{readable[-60:]}-{self.digest}-{seed}"

    def train(self, seed: int) -> Path:
        """Train with a seed, or resume, unless the run is complete. Return its folder. Exit with train.py's code if it
        does not end well. machine.json records who else used the machine, if the run was not interrupted."""
        folder = self.run_dir(seed)
        if (folder / "summary.json").exists():
            return folder
        file, *words = shlex.split(self.text)
        own = [f"--run_dir={folder}", f"--name={folder.name}", f"--seed={seed}"]
        own += [f"--eval.every_steps={max(1, self.config.steps // POINTS)}"]
        resumed, began, before = (folder / "events.jsonl").exists(), time.monotonic(), _seconds_of_others()
        _run(["train.py", f"--config={file}", *words, *OWN, *own], folder)
        others = (_seconds_of_others() - before) / (time.monotonic() - began) / (os.cpu_count() or 1)
        if not resumed:
            write_json(folder / "machine.json", {"machine": platform.node(), "busy_with_others": round(others, 4)})
        return folder

    def documents(self, seed: int, most: int) -> dict[str, tuple[float, int]]:
        """Return the bits and bytes of up to `most` held-out documents under a trained network."""
        folder = self.run_dir(seed)
        out = folder / f"documents-{most}"
        if not list(out.glob("texts/*/bits_per_byte.json")):
            source = most and dataset_folder(self.config.data, self.config.model.vocab_size)
            if not source:
                return {}
            command = [f"--run_dir={folder}", f"--source={source}", f"--documents={most}", f"--out={out}"]
            _run(["evaluate.py", *command], folder)
        (log,) = out.glob("texts/*/documents.jsonl")
        lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
        return {f"{line['source']} {line['document']}": (line["bits"], line["bytes"]) for line in lines}


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


def read_recipes(texts: tuple[str, ...], out: Path) -> list[Recipe]:
    """Return the recipes, with the options of MEASURED. Raise UserError, before anything runs, for a recipe that is not
    valid, or that cannot be paired with the first one. A wrong option exits with code 2."""
    if len(texts) < 2:
        raise UserError('give two recipes or more: configs/small.py "configs/small.py --model.depth=3"')
    recipes = []
    for text in texts:
        try:
            file, *words = shlex.split(text)
        except ValueError as error:
            raise UserError(
                f"{text!r} is not a config with options ({error}); give FILE or 'FILE --OPTION=VALUE'"
            ) from error
        config, _ = parse("A recipe: a config file with options.", argv=[f"--config={file}", *words, *OWN])
        require_steps(config)
        recipes.append(Recipe(text, config, out))
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


def why_seconds_differ(folders: list[Path]) -> str:
    """Return why the runs' seconds are not comparable, with a folder's name, or an empty text."""
    records = {folder.name: folder / "machine.json" for folder in folders}
    if resumed := [name for name, record in records.items() if not record.exists()]:
        return f"{resumed[0]} was interrupted"
    facts = {name: json.loads(record.read_text()) for name, record in records.items()}
    first, *_ = facts
    if others := [name for name, fact in facts.items() if fact["machine"] != facts[first]["machine"]]:
        return f"{others[0]} is of another machine than {first}"
    name, most = max(((name, fact["busy_with_others"]) for name, fact in facts.items()), key=lambda pair: pair[1])
    return f"other programs used {most:.0%} of the machine during {name}" if most > BUSY else ""


def _seconds_of_others() -> float:
    """Return the processor seconds that others have used on this machine: all but our ended processes. Without Linux's
    /proc they count as always busy."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return time.monotonic() * (os.cpu_count() or 1)
    user, nice, system, _, _, *more = map(int, stat.read_text().splitlines()[0].split()[1:9])
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK") - ours.ru_utime - ours.ru_stime


def _run(words: list[str], folder: Path) -> None:
    """Run a command of this repository, with its output in FOLDER.log. Exit with its code if that is not 0."""
    log = folder.with_name(f"{folder.name}.log")
    with log.open("a") as file:
        code = run_program(words, file)
    if code != Exit.COMPLETE:
        tail = log.read_text(errors="replace")[-1500:]
        print(f"{tail}\n{words[0]} ended with exit code {code} in {folder.name}; all of it: {log}", file=sys.stderr)
        raise SystemExit(code)


def run_program(words: list[str], output: TextIO) -> int:
    """Run a command of this repository, with its output in a file. Return its exit code, a signal as a shell reports
    it. Ctrl-C and SIGTERM end the command, not this function."""
    child = subprocess.Popen([sys.executable, ROOT / words[0], *words[1:]], stdout=output, stderr=subprocess.STDOUT)
    handlers = {
        signal.SIGINT: lambda *_: None,  # a terminal's Ctrl-C reaches the child, which saves
        signal.SIGTERM: lambda *_: child.terminate(),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
