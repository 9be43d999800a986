"""Reinforcement of a network that answers: python reinforce.py --config=configs/reinforce.py --init_from=runs/chat

The same command again continues the run. It is train.py's loop, but for the batch: a step's rows are the answers that
the network has just drawn, and their weights are advantages.
"""

import gc

from configs.arguments import StartArguments
from configs.command_line import parse_own, refuse_mistakes
from configs.schema import Config
from system.errors import Exit

if __name__ == "__main__":
    refuse_mistakes(parse_own, __doc__, StartArguments)  # before the imports, which take seconds

import train
from hosts.distributed import on_first_process
from hosts.preflight import preflight
from hosts.runtime import run_command
from hosts.stop import Stop
from reinforcement.rollouts import Rollouts, advantages
from reinforcement.start import RewardLog, open_task
from run import ending, start
from run.fitting import Fitting
from run.metrics import Profile
from run.record import Times, scores


def reinforce(config: Config, arguments: StartArguments, stop: Stop, times: Times) -> Exit:
    """Reinforce, or resume, until `config.steps`. Raise StartAgain if the memory ran out: the next start takes fewer
    rows."""
    start.check_processes(config, arguments)
    fitting = Fitting(config)
    built, questions, task = open_task(fitting.first_config())
    status = start.claim_folder(built.config, questions, arguments.accept_changes)
    preflight(built.config, built.mesh, questions.tokenizer.sha256)
    checkpoints = start.open_checkpoints(built.config, questions, arguments.resume_step)
    if status.finished == checkpoints.newest == built.config.steps:
        return ending.already_complete(built.config, status.changes)
    built, (train_step, _) = fitting.compile(built, checkpoints.newest, times)
    config = built.config

    resume_point = start.resume(built, checkpoints, times) or start.begin(built)
    rollouts = Rollouts(built, task, questions.tokenizer, resume_point.state.params)
    start.record_start(built, questions, status.changes, resume_point)
    state, step = resume_point.state, resume_point.step
    profile = Profile(config, step)
    log = RewardLog(built, questions, resume_point, start.batches_after(resume_point, built, questions), times)
    checkpoints.scores = log.scores  # the best one is kept
    if status.changes:
        log.write(step, {"changes": status.changes})
    gc.freeze()

    with (
        fitting.fewer_rows_if_out_of_memory(built),
        checkpoints,
        log,
        profile,
        times.during("steps"),
        stop.deferred_signals(),
    ):
        if not on_first_process(lambda: step in scores(config.run_dir, "pass_at_1")):
            train.evaluate_if_due(step, state.params, rollouts, log, stop)
        while step < config.steps and not stop.agreed():
            profile.before(step + 1, state)
            log.watchdog.dispatch(step + 1)
            answers = rollouts.of_step(state.params, step, stop.agreed)
            if answers is None:
                break
            weights, equal_rewards = advantages(answers, config.reinforce.samples)
            figures = {"reward": sum(one.reward for one in answers) / len(answers), "equal_rewards": equal_rewards}
            figures["tokens_per_answer"] = sum(len(one.answer.tokens) for one in answers) / len(answers)
            if train.is_due(step + 1, config.log.every_steps):
                figures["entropy"] = rollouts.entropy(state.params, answers)
            state, metrics = train_step(state, rollouts.batch(answers, weights))
            step += 1
            log.step(step, {**metrics, **figures})
            profile.after(step, state)

            train.save_if_due(step, state, checkpoints, log)
            train.evaluate_if_due(step, state.params, rollouts, log, stop)
        log.flush()
        stopped = stop.agreed()
        with log.saving():
            checkpoints.save_last(step, state, log.facts(step))
    if stopped:
        return ending.stopped(config, step, stop, times)
    return ending.complete(config, state, log.tokens(step), log.clock.seconds, times)


if __name__ == "__main__":
    run_command(lambda: train.main(__doc__, run=reinforce))
