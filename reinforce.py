"""Reinforcement of a network that answers: python reinforce.py --config=configs/reinforce.py --init_from=runs/chat

The same command again continues the run. It is the loop of train.py. Only the source of a step's batch differs: its
rows are the answers that the network has just drawn, and their weights are advantages.
"""

from options.arguments import StartArguments
from options.command_line import parse_own, refuse_mistakes

if __name__ == "__main__":
    refuse_mistakes(parse_own, __doc__, StartArguments)  # before the imports, which take seconds

from hosts.runtime import run_command
from reinforcement.questions import open_questions
from reinforcement.rollouts import rollouts_of
from run.source import Stage
from train import main

REINFORCEMENT = Stage(open_questions, rollouts_of)

if __name__ == "__main__":
    run_command(lambda: main(__doc__, REINFORCEMENT))
