"""Write the scripts of a TPU slice's hosts: a loop that restarts train.py by its exit code, and shell around it.

Everything is in /var/tmp/tokensum/NAME, which survives a reboot and is the same for every user:

    code/HASH, loop.sh, log, runs/NAME
    environment    variables and secrets of train.py
    lock           taken while the loop runs
    crashes        one line each
    ended          the last exit code, once it is over
    stop           if it exists, the loop ends train.py and does not restart it
    typed          when a person typed the command
    limit          when the run stops even if nobody watches
    kept           the URL that the log is copied to

gcloud repeats a command if its connection breaks, so each of these may safely run twice.
"""

from shlex import join, quote

from tools.launch.code import unpack
from tools.launch.job import AGAIN, DONE, NEVER, Job, pattern

USER = "tokensum"
"""The user who logs in, for every person. OS Login chooses other names, so every user may write to the folder."""
ROOT = "/var/tmp/tokensum"
SETUP = (
    f"export UV_PYTHON_INSTALL_DIR={ROOT}/python; "
    "python3 -m pip install --user --quiet uv && ~/.local/bin/uv python install --quiet 3.12 && "
    'make setup EXTRA=tpu,gcs PYTHON="$(~/.local/bin/uv python find 3.12)"'
)
"""The README's command, with a newer Python than the TPU's Ubuntu has, in a folder that every user can read."""
KEEP = 'timeout 60 gcloud storage cp --quiet "$here/log" "$(cat "$here/kept")"'
"""Shell that copies the host's log to the bucket."""


def folder(name: str) -> str:
    """Return the job's folder on a host, for a shell."""
    return f"${{LAUNCH_ROOT:-{ROOT}}}/{name}"


def loop(job: Job, home: str) -> str:
    """Return the loop: it starts train.py in `home` again and again, counts crashes over reboots, and keeps the log."""
    train = join(job.train_in(f"runs/{job.name}"))
    return f"""\
#!/bin/bash
# Written by python -m tools.launch tpu.
umask 000
here="{folder(job.name)}"
[ ! -e "$here/ended" ] || exit 0
tell() {{ echo "--- $(date -u +%FT%TZ) $*"; }}
keep() {{ {KEEP} > /dev/null 2>&1 || tell "the log could not be copied to $(cat "$here/kept")"; }}
end() {{ tell "ended with $1"; keep; echo "$1" > "$here/ended.new"; mv "$here/ended.new" "$here/ended"; exit 0; }}
mkdir -p "$here/runs" && cd "{home}" && ln -sfn "$here/runs" runs || end 2
set -a; . "$here/environment" || end 2; set +a
code=143
while [ ! -e "$here/stop" ]; do
    tell "start"
    .venv/bin/python train.py {train} &
    train=$! stopping=
    while kill -0 $train 2> /dev/null; do
        if [ -e "$here/stop" ] && [ -z "$stopping" ]; then stopping=yes; kill -TERM $train; fi
        sleep "${{LAUNCH_PAUSE:-1}}"
    done
    wait $train
    code=$?
    case "$code" in
        {pattern(DONE)}|{pattern(NEVER)}) end "$code" ;;
        {pattern(AGAIN)}) ;;
        *) echo "$code" >> "$here/crashes"; [ "$(wc -l < "$here/crashes")" -le {job.max_crashes} ] || end "$code" ;;
    esac
    tell "train.py ended with $code: it starts again"
    keep
    sleep "${{LAUNCH_PAUSE:-10}}"
done
end "$code"
"""


def limit(name: str, delete: list[str]) -> str:
    """Return a script that stops the run at its limit and asks for the slices' deletion, even if nobody watches. A new
    `prepare` meanwhile, for whose set-up it waits, sets another limit and keeps the slices."""
    return f"""\
#!/bin/bash
# Written by python -m tools.launch tpu.
cd "{folder(name)}" || exit
left() {{ flock preparing true; echo $(($(cat limit) - EPOCHSECONDS)); }}
while true; do
    while left=$(left); [ "$left" -gt 0 ]; do sleep $((left < 60 ? left : 60)); done
    echo "--- $(date -u +%FT%TZ) the limit is reached: the run stops, and the slices are deleted if this account may"
    touch stop
    flock --timeout 3600 lock true  # released while this sleeps: a start would take it for a run
    sleep "${{LAUNCH_PAUSE:-300}}"
    [ "$(left)" -gt 0 ] || exec {join(delete)}
done
"""


def prepare(job: Job, setup: str, typed: int, until: int, bucket: str, delete: list[str]) -> str:
    """Return a script that unpacks the code, which is in the home folder as launch-HASH.tar, and sets it up, one at a
    time. A new `typed` (milliseconds since 1970) clears an earlier end or stop. The host stops the run at `until`, then
    runs `delete`, and copies its log to `bucket`."""
    home = f"{folder(job.name)}/code/{job.code.name}"
    return f"""\
#!/bin/bash
# Written by python -m tools.launch tpu.
set -e
umask 000
here="{folder(job.name)}"
mkdir -p "$here"
exec 9> "$here/preparing"
flock 9
{unpack(job.code, f"$HOME/launch-{job.code.name}.tar", "$here/code")}
cd "$here/code/{job.code.name}"
if [ ! -e .launch-ready ]; then
    bash -c {quote(setup)} 9>&-
    touch .launch-ready
fi

cat > "$here/loop.sh.$$" <<'LOOP'
{loop(job, home)}LOOP
cat > "$here/limit.sh.$$" <<'LIMIT'
{limit(job.name, delete)}LIMIT
echo {until} > "$here/limit.$$"
for name in loop.sh limit.sh limit; do mv "$here/$name.$$" "$here/$name"; done
if [ ! -e "$here/kept" ]; then
    echo "{bucket}/logs/$(hostname)-$(date -u +%Y%m%dT%H%M%SZ).log" > "$here/kept"
fi
cd "$here"
if [ "$(cat typed 2> /dev/null)" != {typed} ]; then
    rm -f ended stop crashes environment
    echo {typed} > typed
fi
if [ -e "$HOME/launch-{typed}" ]; then
    mv -f "$HOME/launch-{typed}" environment
    chmod 600 environment
fi
touch environment
"""


def start(name: str) -> str:
    """Return shell that starts the loop, detached, unless it runs or has ended since `typed`. On a host that lost its
    disk since `prepare` it does nothing; `state` shows that."""
    detached = ">> log 2>&1 < /dev/null &"
    return (
        f'umask 000; cd "{folder(name)}" 2> /dev/null || exit 0; '
        f"{{ setsid nohup flock --nonblock limiting bash limit.sh {detached} }}; "
        "{ test -e ended || ! flock --nonblock lock true || "
        f"{{ setsid nohup flock --timeout 5 lock bash loop.sh {detached} }}; }}"
    )


def state(name: str) -> str:
    """Return shell that prints "HOST none", "HOST idle", "HOST running" or "HOST ended CODE"."""
    return (
        f'umask 000; cd "{folder(name)}" 2> /dev/null || {{ echo "$(hostname) none"; exit 0; }}; '
        'if [ -s ended ]; then echo "$(hostname) ended $(cat ended)"; '
        'elif flock --nonblock lock true; then echo "$(hostname) idle"; else echo "$(hostname) running"; fi'
    )


def stop(name: str) -> str:
    """Return shell by which the loop ends train.py, which saves, and does not start it again."""
    return f'umask 000; cd "{folder(name)}" 2> /dev/null || exit 0; touch stop'


def keep(name: str) -> str:
    """Return shell that copies each host's log to the bucket, if it has one."""
    return f'here="{folder(name)}"; test ! -e "$here/log" || {KEEP}'


def logs(name: str, lines: int) -> str:
    """Return shell that follows the log, each line with its host's name."""
    return f'tail -n {lines} -F "{folder(name)}/log" | sed -u "s/^/$(hostname): /"'
