#!/usr/bin/env bash
# Start train.py, and start it again as its exit code says: launch/loop.sh --run_dir=RUN [arguments of train.py].
#
# This is the only place with the restart policy. docs/checkpoints.md has the table of exit codes.
#   0, 1, 2, 3, 130    the run is over: complete, failed, a user's mistake, no readable checkpoint, ended by a person
#   any other code     start again: 42 (a lost peer, a hang), 143 (preempted), 134, 137 and 139 (crashes)
#
# MAX_STARTS=10 starts in a row without progress end the loop with code 1. Progress is a newer folder in the run's
# checkpoints. A bucket is not listed: there, a start of PROGRESS_SECONDS=1800 is progress.
#
# SIGTERM and SIGINT go to train.py, which saves. The loop then ends with 143 or 130: another machine may start it again.
#
# DEADLINE, a time for `date --date` such as "YYYY-MM-DD HH:MM" or @SECONDS, ends the run: SIGTERM, then SIGKILL after
# SAVE_SECONDS=600. The loop's code is then 124.
set -u
cd "$(dirname "$0")/.." || exit 2

run_dir=
for word in "$@"; do
    case $word in
        --run_dir=*) run_dir=${word#*=} ;;
    esac
done
if [ -z "$run_dir" ]; then
    echo "error: launch/loop.sh needs --run_dir=FOLDER or --run_dir=gs://BUCKET/RUN" >&2
    exit 2
fi
deadline=
if [ -n "${DEADLINE:-}" ]; then
    deadline=$(date --date="$DEADLINE" +%s) || exit 2
fi
python=.venv/bin/python
[ -x "$python" ] || python=python # in the image

# Below, nothing is read by $(...): bash loses a signal that arrives while it starts one.
say() { TZ=UTC printf -- '--- %(%FT%TZ)T %s\n' -1 "$*"; }

find_newest_checkpoint() { # into `newest`: its step, -1 without one
    newest=-1
    for folder in "$run_dir"/checkpoints/*; do
        step=${folder##*/}
        [[ $step =~ ^[0-9]+$ ]] && [ "$step" -gt "$newest" ] && newest=$step
    done
}

made_progress() {
    case $run_dir in
        *://*) [ $((SECONDS - began)) -ge "${PROGRESS_SECONDS:-1800}" ] ;;
        *) find_newest_checkpoint; [ "$newest" -gt "$before" ] ;;
    esac
}

signal=
train=
forward() {
    signal=$1
    [ -z "$train" ] || kill -s "$signal" "$train" 2> /dev/null
}
stop_if_signalled() {
    case $signal in
        TERM) exit 143 ;;
        INT) exit 130 ;;
    esac
}
trap 'forward TERM' TERM
trap 'forward INT' INT

fruitless=0
while true; do
    began=$SECONDS
    find_newest_checkpoint
    before=$newest
    left=0 # no limit, for `timeout`
    if [ -n "$deadline" ]; then
        left=$((deadline - EPOCHSECONDS))
        if [ "$left" -le 0 ]; then
            say "the deadline is reached"
            exit 124
        fi
    fi
    stop_if_signalled
    timeout --foreground --signal=TERM --kill-after="${SAVE_SECONDS:-600}" "$left" "$python" train.py "$@" &
    train=$!
    [ -z "$signal" ] || kill -s "$signal" "$train" # it came just before the start
    while kill -0 "$train" 2> /dev/null; do # a signal interrupts `wait`
        wait "$train"
    done
    wait "$train"
    code=$?
    train=
    say "train.py ended with $code"
    case $code in
        0 | 1 | 2 | 3 | 130) exit "$code" ;;
    esac
    stop_if_signalled
    fruitless=$((fruitless + 1))
    if made_progress; then
        fruitless=0
    fi
    if [ "$fruitless" -ge "${MAX_STARTS:-10}" ]; then
        say "$fruitless starts in a row without progress: not started again"
        exit 1
    fi
    for ((second = 0; second < ${PAUSE:-10}; second++)); do
        stop_if_signalled
        sleep 1
    done
done
