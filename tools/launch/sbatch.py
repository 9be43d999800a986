"""Run under SLURM: python -m tools.launch slurm up|status|logs|down. One task per node; the job requeues itself.

`--requeue` alone does not cover a job that ends by itself, so the batch script calls `scontrol requeue` if the run's
exit code asks for a restart. Options of sbatch are from its manual, of SLURM 22.05 and later.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote

from configs.command_line import Exit
from configs.schema import FilePath, Positive, UserError
from tools.launch.code import unpack
from tools.launch.job import AGAIN, DONE, NEVER, Job, TimedOptions, cost, job_name, make_job, pattern
from tools.launch.shell import Shell, ask, say

VERDICT = f"""\
# Of lines "CODE HOST", one a process: what follows, and the line it follows from. A code that must not be repeated
# counts before a crash, and a crash before the 42 of its peers.
verdict() {{
    local code host answer="done"
    while read -r code host; do
        case "$code" in
            {pattern(DONE)}) ;;
            {pattern(NEVER)}) echo "never $code on $host"; return ;;
            {pattern(AGAIN)}) [ "${{answer%% *}}" = crash ] || answer="again $code on $host" ;;
            *) [ "${{answer%% *}}" = crash ] || answer="crash $code on $host" ;;
        esac
    done
    echo "$answer"
}}
"""


@dataclass(frozen=True)
class SlurmOptions(TimedOptions):
    """Options of `python -m tools.launch slurm`."""

    folder: FilePath = ""
    """A folder on a disk that all nodes share: FOLDER/NAME has the job's code, log and run."""
    time: str = "24:00:00"
    """The time limit of one start (sbatch --time); the run resumes in the next."""
    notice: Positive[int] = 300
    """Seconds before the time limit at which the run gets SIGTERM, to save and end."""
    sbatch: str = ""
    """More options of sbatch: --sbatch="--partition=gpu --account=mine"."""
    setup: str = ""
    """The command that makes .venv in the code's folder, on this machine; empty: `make setup`, with
    EXTRA=cuda for GPUs."""


def up(options: SlurmOptions, train: list[str]) -> None:
    """Put a run into SLURM's queue. The same command again changes nothing while the job is there."""
    job = make_job(options, train, "/")
    if job.hardware.is_tpu:
        raise UserError(f"--hardware={job.hardware}: TPUs are launched by `python -m tools.launch tpu` or `k8s`")
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED", options.time):
        raise UserError(f"--time={options.time}: sbatch takes minutes, HH:MM:SS, or DAYS-HH:MM:SS, such as 24:00:00")
    folder, shell = folder_of(options, job.name), Shell(options.dry_run)
    say(cost(job, options.price, options.hours))
    question = ["squeue", "--me", f"--name={job.name}", "--noheader", "--format=%i"]
    if not shell.dry_run and (queued := ask(question).stdout.split()):
        return say(f"{job.name} is in the queue already, as {queued[0]}; `slurm down` takes it out")
    archive, home = folder / f"{job.code.name}.tar", folder / "code" / job.code.name
    shell.write(archive, job.code.archive)
    shell.run(["bash", "-c", unpack(job.code, str(archive), str(folder / "code"))])
    setup = options.setup or f"make setup CUDA= EXTRA={'' if job.hardware.kind == 'cpu' else 'cuda'}"
    shell.run(["bash", "-c", f"cd {quote(str(home))} && bash -c {quote(setup)}"])
    shell.run(["rm", "-f", *(str(folder / name) for name in ("stop", "crashes", "environment")), str(archive)])
    if names := [*job.env, *job.secrets]:
        shell.write(folder / "environment", job.exports, names)
    shell.write(folder / "job.sh", script(job, options, folder, home))
    submitted = shell.run(["sbatch", str(folder / "job.sh")]).stdout.strip()
    rest = f"--folder={options.folder} --name={job.name}"
    shell.say(f"{submitted}\npython -m tools.launch slurm logs {rest}   # or status, down")


def script(job: Job, options: SlurmOptions, folder: Path, home: Path) -> str:
    """Return the batch script. SIGTERM reaches the tasks `notice` seconds before the time limit (sbatch --signal
    without B: spares the script itself); each task notes its own exit code, since srun returns only the highest."""
    count = job.hardware.devices_per_host
    gpus = [] if job.hardware.kind == "cpu" else [f"--gpus-per-node={count}"]
    if count == job.hardware.facts.get("devices_per_host"):
        gpus += ["--exclusive", "--mem=0"]  # all of a node whose GPUs are all taken
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.hardware.hosts}",
        "--ntasks-per-node=1",
        *gpus,
        f"--time={options.time}",
        f"--signal=TERM@{options.notice}",
        "--requeue",
        "--open-mode=append",
        f"--output={folder}/log",
        *options.sbatch.split(),
    ]
    header = "\n".join(f"#SBATCH {line}" for line in lines)
    return f"""\
#!/bin/bash
{header}
# Written by python -m tools.launch slurm up.
folder={quote(str(folder))}
cd {quote(str(home))} || exit 2
if [ -e "$folder/environment" ]; then . "$folder/environment" || exit 2; fi
if [ -e "$folder/stop" ]; then exit 0; fi

{VERDICT}
export JAX_COORDINATOR_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export JAX_COORDINATOR_ADDRESS="$JAX_COORDINATOR_ADDRESS:$((20000 + SLURM_JOB_ID % 20000))"
export JAX_NUM_PROCESSES=$SLURM_NTASKS
export codes="$folder/codes/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"
rm -rf "$codes" && mkdir -p "$codes" || exit 2
echo "--- $(date -u +%FT%TZ) job $SLURM_JOB_ID, start ${{SLURM_RESTART_COUNT:-0}}, on $SLURM_JOB_NODELIST"

{until(options.hours)}
# Each task waits for train.py when it gets SIGTERM, and notes how that ended. No task is killed for another's end:
# all save together. Lines begin with the task's number.
srun --label --kill-on-bad-exit=0 --wait=0 --cpu-bind=none bash -c '
    trap : TERM
    export JAX_PROCESS_ID=$SLURM_PROCID
    "$@"
    code=$?
    echo "$code $SLURMD_NODENAME" > "$codes/$SLURM_PROCID"
    exit $code' task {join([".venv/bin/python", "train.py", *job.train_in(f"{folder}/run")])}
for ((task = 0; task < SLURM_NTASKS; task++)); do  # one that left no note was killed with its node
    [ -s "$codes/$task" ] ||
        echo "137 $(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$((task + 1))p")" > "$codes/$task"
done
[ -z "$watching" ] || kill "$watching" 2> /dev/null
read -r answer code _ host <<< "$(cat "$codes"/* | verdict)"
echo "--- $(date -u +%FT%TZ) ${{answer}} ${{code:+($code on $host)}}"
if [ "$answer" = "done" ]; then exit 0; fi
if [ "$answer" = never ]; then exit "$code"; fi
if [ "$answer" = crash ]; then
    echo "$code $host" >> "$folder/crashes"
    if [ "$(grep -c " $host\\$" "$folder/crashes")" -gt 1 ]; then
        echo "$host has crashed $(grep -c " $host\\$" "$folder/crashes") times"
    fi
    if [ "$(wc -l < "$folder/crashes")" -gt {job.max_crashes} ]; then
        echo "more than {job.max_crashes} crashes: not started again"
        exit "$code"
    fi
fi
if [ -e "$folder/stop" ]; then
    echo "stopped by launch slurm down, or at its deadline"
    exit "$code"
fi
# Leaves out the nodes that have crashed twice, if the partition has others. SLURM takes that for a job in its queue.
leave_out() {{
    local bad listed nodes
    bad=$(awk '{{ if (++times[$2] == 2) print $2 }}' "$folder/crashes" 2>/dev/null | paste -sd,)
    [ -n "$bad" ] || return
    listed=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.* ExcNodeList=\\([^ ]*\\).*/\\1/p')
    [ "$listed" = "(null)" ] || bad="$bad,$listed"
    nodes=$(sinfo --noheader --partition="$SLURM_JOB_PARTITION" --states=idle,alloc,mix --format=%D)
    nodes=$(echo "$nodes" | awk '{{ n += $1 }} END {{ print n + 0 }}')
    [ "$nodes" -ge $((SLURM_JOB_NUM_NODES + $(scontrol show hostnames "$bad" | sort -u | wc -l))) ] || return
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$bad" && echo "left out from now on: $bad"
}}
trap '' TERM  # which a script gets that puts its job back into the queue
for attempt in 1 2 3 4 5; do
    scontrol requeue "$SLURM_JOB_ID" && {{ leave_out; exit "$code"; }}
    sleep $((attempt * ${{LAUNCH_PAUSE:-10}}))
done
echo "scontrol requeue failed: the same launch command continues the run"
exit "$code"
"""


def until(hours: float) -> str:
    """Return lines of the script that end the run at its deadline as `down` does."""
    if not hours:
        return "watching="
    return f"""\
left=$(({int(time.time() + 3600 * hours)} - $(date +%s)))
[ "$left" -gt 0 ] || {{ echo "the deadline has passed"; exit {int(Exit.PREEMPTED)}; }}
(   sleep "$left"; touch "$folder/stop"; scancel --signal=TERM "$SLURM_JOB_ID" ) &
watching=$!"""


def folder_of(options: SlurmOptions, name: str) -> Path:
    """Return the job's folder. Raise UserError if `--folder` is no absolute path."""
    if not options.folder:
        raise UserError("--folder is missing: a folder on a disk that all nodes share")
    path = Path(options.folder).expanduser()
    if not path.is_absolute() or not re.fullmatch(r"[\w./+@=-]+", str(path)):
        raise UserError(f"--folder={options.folder}: give an absolute path without spaces, quotes or the like")
    return path / name


def status(options: SlurmOptions, train: list[str]) -> None:
    """Show the job in SLURM's queue, and its crashes."""
    name, shell = job_name(options.name), Shell(options.dry_run)
    folder = folder_of(options, name)
    say(shell.run(["squeue", "--me", f"--name={name}"]).stdout.rstrip())
    if not shell.dry_run and (folder / "crashes").exists():
        say(f"crashes (exit code, host):\n{(folder / 'crashes').read_text()}")


def logs(options: SlurmOptions, train: list[str]) -> None:
    """Follow the job's log from its first line, over all its starts, until Ctrl-C."""
    words = ["tail", "-n", "+1", "-F", str(folder_of(options, job_name(options.name)) / "log")]
    Shell(options.dry_run).become(words)


def down(options: SlurmOptions, train: list[str]) -> None:
    """End the job: the run saves, and does not restart. What it saved stays."""
    name, shell = job_name(options.name), Shell(options.dry_run)
    folder = folder_of(options, name)
    if not shell.dry_run and not folder.is_dir():
        raise UserError(f"{folder} does not exist: no job of that name was started from --folder={options.folder}")
    shell.run(["touch", str(folder / "stop")])  # else the job would put itself back into the queue
    running = ["--me", f"--name={name}"]
    shell.run(["scancel", *running, "--state=PENDING"])
    shell.run(["scancel", *running, "--state=RUNNING", "--signal=TERM"])
    say(f"it saves and ends; at once, without saving: scancel {join(running)}")


COMMANDS = {f.__name__: (f, SlurmOptions) for f in (up, status, logs, down)}
