"""Hooks around a run's steps. train.py lists them in the order in which they run."""

from run.hooks.evaluate import Evaluate
from run.hooks.history import History
from run.hooks.hook import Hook
from run.hooks.idle import Idle
from run.hooks.judge import Judge
from run.hooks.log import Log
from run.hooks.overfitting import Overfitting
from run.hooks.profile import Profile
from run.hooks.save import Save
from run.hooks.watch import Watch

__all__ = ["Evaluate", "History", "Hook", "Idle", "Judge", "Log", "Overfitting", "Profile", "Save", "Watch"]
