"""Hooks around a run's steps. train.py lists them in the order in which they run."""

from run.hooks.evaluate import Evaluate, Overfitting
from run.hooks.judge import Judge
from run.hooks.log import History, Log
from run.hooks.save import Save
from run.hooks.watch import Idle, Profile, Watch

__all__ = ["Evaluate", "History", "Idle", "Judge", "Log", "Overfitting", "Profile", "Save", "Watch"]
