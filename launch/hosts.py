"""What runs on the hosts of a TPU slice: a loop that starts train.py again as its exit code says, and shell about it.

Everything lies in ~/launch/NAME: code/HASH, loop.sh, log, runs/NAME; `lock`, held while the loop runs; `ended`, with
the last exit code, once it is over; `stop`, which keeps it from starting again. gcloud repeats a command whose
connection breaks, so each of these is harmless when it runs twice.
"""

from shlex import join, quote

from launch.code import Code, unpack
from launch.job import AGAIN, DONE, NEVER, Job
from launch.restart import pattern

SETUP = (
    "python3 -m pip install --user --quiet uv && ~/.local/bin/uv python install --quiet 3.12 && "
    'make setup EXTRA=tpu,gcs PYTHON="$(~/.local/bin/uv python find 3.12)"'
)
"""The README's command, with a Python that the TPU's Ubuntu does not have."""


def folder(name: str) -> str:
    """The job's folder on a host, for a shell."""
    return f"$HOME/launch/{name}"


def loop(job: Job, home: str) -> str:
    """The loop: starts train.py in `home` again and again. A SIGTERM to it reaches train.py, which saves."""
    train = join([*job.train, f"--run_dir=runs/{job.name}"])
    return f"""\
#!/bin/bash
# Written by python -m launch tpu.
here="{folder(job.name)}"
[ ! -e "$here/ended" ] || exit 0
crashes=0
tell() {{ echo "--- $(date -u +%FT%TZ) $*"; }}
end() {{ tell "ended with $1"; echo "$1" > "$here/ended.new"; mv "$here/ended.new" "$here/ended"; exit 0; }}
mkdir -p "$here/runs" && cd "{home}" && ln -sfn "$here/runs" runs || end 2
code=143
while [ ! -e "$here/stop" ]; do
    tell "start"
    .venv/bin/python train.py {train} &
    echo $! > "$here/pid"
    wait $!
    code=$?
    case "$code" in
        {pattern(DONE)}|{pattern(NEVER)}) end "$code" ;;
        {pattern(AGAIN)}) ;;
        *) crashes=$((crashes + 1)); [ "$crashes" -le {job.max_crashes} ] || end "$code" ;;
    esac
    tell "train.py ended with $code: it starts again"
    sleep "${{LAUNCH_PAUSE:-10}}"
done
end "$code"
"""


def prepare(job: Job, code: Code, setup: str, forget: bool) -> str:
    """Shell that unpacks the code, which lies in the home folder as launch-HASH.tar, and sets it up, one at a time.
    `forget`: whatever ended or stopped the run before, as a person has typed the command again."""
    here, home = folder(job.name), f"{folder(job.name)}/code/{code.name}"
    steps = (
        f'{unpack(code, f"$HOME/launch-{code.name}.tar", f"{here}/code")} && cd "{home}" && '
        f"{{ test -e .launch-ready || {{ bash -c {quote(setup)} && touch .launch-ready; }}; }} && "
        f'printf %s {quote(loop(job, home))} > "{here}/loop.$$" && mv "{here}/loop.$$" "{here}/loop.sh"'
    )
    steps += f' && rm -f "{here}/ended" "{here}/stop"' if forget else ""
    return f'mkdir -p "{here}" && flock "{here}/preparing" bash -c {quote(steps)}'


def start(name: str) -> str:
    """Shell that starts the loop, detached, unless it runs, or has ended and nobody has forgotten it. On a host that
    lost its disk since `prepare` it does nothing; `state` tells of it."""
    return (
        f'cd "{folder(name)}" 2>/dev/null || exit 0; {{ test -e ended || ! flock --nonblock lock true || '
        "{ setsid nohup flock --timeout 5 lock bash loop.sh >> log 2>&1 < /dev/null & }; }"
    )


def state(name: str) -> str:
    """Shell that prints "HOST none", "HOST idle", "HOST running" or "HOST ended CODE"."""
    return (
        f'cd "{folder(name)}" 2>/dev/null || {{ echo "$(hostname) none"; exit 0; }}; '
        'if [ -s ended ]; then echo "$(hostname) ended $(cat ended)"; '
        'elif flock --nonblock lock true; then echo "$(hostname) idle"; else echo "$(hostname) running"; fi'
    )


def stop(name: str) -> str:
    """Shell that tells train.py to save and end, and the loop not to start it again."""
    return (
        f'cd "{folder(name)}" 2>/dev/null || exit 0; touch stop; '
        '{ flock --nonblock lock true || kill -TERM "$(cat pid)"; } 2>/dev/null; true'
    )


def logs(name: str, lines: int) -> str:
    """Shell that follows the log, each line with its host's name."""
    return f'tail -n {lines} -F "{folder(name)}/log" | sed -u "s/^/$(hostname): /"'
