"""Record the results of tools.tune in tune.json, which is rewritten after each finished piece of work."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from configs.files import write_whole
from configs.messages import LOGGER
from configs.schema import Config, UserError, options
from model.gpt import flops_per_token
from run.record import finite

STAGES = ("fit", "time", "noise", "rate", "branch")


@dataclass(frozen=True)
class Decision:
    """The decision of a stage."""

    stage: str
    says: str
    """The choice, or that there is none, with its interval and reason."""
    kind: Literal["measured", "extrapolated", "not done"]
    options: dict[str, Any]
    """The chosen values by the options' names; for rate and batch, the factors."""


class Record:
    """Pieces of work by name (`rate/1/x2`) in a folder, each with its cost in `tokens`. A recorded piece is not
    repeated."""

    def __init__(self, folder: Path, config: Config, budget: float, device: Any, devices: int):
        """Read the folder's record. `budget`: a share of the run's FLOPs; 0 is no limit. Raise UserError if the record
        is of another config, machine or version."""
        self.path = folder / "tune.json"
        self.run_tokens = config.steps * config.batch.tokens_per_step
        self.allowed = budget * self.run_tokens if budget else math.inf
        machine = {"device": device.device_kind, "devices": devices, "jax": jax.__version__}
        self.facts = {
            "config": options(config),
            "machine": machine,
            "budget": budget,
            "run_tokens": self.run_tokens,
            "flops_per_token": flops_per_token(config.model, config.batch.sequence_length),
        }
        self.pieces: dict[str, dict] = {}
        self.decisions: dict[str, Decision] = {}
        """By stage, in the order of the stages, including earlier starts."""
        if self.path.exists():
            before = json.loads(self.path.read_text())
            self._require_same(before)
            self.pieces = before["pieces"]
            self.decisions = {decision["stage"]: Decision(**decision) for decision in before["decisions"]}

    def _require_same(self, before: dict) -> None:
        now = json.loads(json.dumps(self.facts))  # JSON has no tuples
        old, new = ({**facts["machine"], **facts["config"]} for facts in (before, now))
        names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        if names:
            different = "\n  ".join(f"{name}: {old.get(name)}, now {new.get(name)}" for name in names)
            raise UserError(
                f"{self.path} is of another config, machine or version; give another --out. Differences:\n  {different}"
            )

    def pieces_of(self, stage: str) -> dict[str, dict]:
        """Return the pieces of a stage, by the rest of their names."""
        return {name[len(stage) + 1 :]: piece for name, piece in self.pieces.items() if name.startswith(f"{stage}/")}

    def piece(self, name: str, work: Callable[[], dict]) -> dict:
        """Return the recorded piece, or do the `work`, which returns it as JSON with its cost in `tokens`, and record
        it."""
        if name not in self.pieces:
            self.pieces[name] = work()
            self.write()
        return self.pieces[name]

    def decide(self, decision: Decision) -> None:
        """Record a stage's decision, instead of its earlier one, and log it."""
        made = {**self.decisions, decision.stage: decision}
        self.decisions = {stage: made[stage] for stage in STAGES if stage in made}
        self.write()
        cost = self.share(self.cost(decision.stage))
        LOGGER.info(f"{decision.stage}: {decision.says} ({decision.kind}; cost {cost} of the run)")

    def options(self, *stages: str) -> dict[str, Any]:
        """Return what these stages decided, from this start or an earlier one. A later stage's choice replaces an
        earlier one's."""
        made = [decision.options for stage, decision in self.decisions.items() if stage in stages]
        return {name: value for options in made for name, value in options.items()}

    def write(self) -> None:
        """Write the complete file."""
        decisions = [vars(decision) for decision in self.decisions.values()]
        whole = {**self.facts, "spent": self.spent / self.run_tokens, "decisions": decisions, "pieces": self.pieces}
        whole = finite(whole, instead=str)  # "inf", which `float` parses
        write_whole(self.path, json.dumps(whole, indent=1, allow_nan=False) + "\n")

    @property
    def spent(self) -> float:
        """Return the tokens that the pieces cost."""
        return sum(map(self.cost, STAGES))

    @property
    def left(self) -> float:
        """Return the tokens that may still be spent."""
        return max(0.0, self.allowed - self.spent)

    def cost(self, stage: str) -> float:
        """Return the tokens that a stage cost."""
        return sum(piece.get("tokens", 0) for piece in self.pieces_of(stage).values())

    def share(self, tokens: float) -> str:
        """Return tokens as a share of the run, for messages: `1.25%`."""
        return f"{100 * tokens / self.run_tokens:.3g}%"
