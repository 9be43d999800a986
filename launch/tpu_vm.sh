#!/usr/bin/env bash
# Train on TPU VMs: launch/tpu_vm.sh create --config=... --run_dir=gs://... | wait | status | logs | delete
# `create` copies what is committed to the bucket and requests the slices. Each host then sets itself up at its boot, and
# runs launch/loop.sh as a service that also starts after a reboot. Once the run is over, or at the deadline, the hosts
# delete the slices; that needs roles/tpu.admin for their service account. Settings come from the environment:
#
#   NAME PROJECT ZONE    of the queued resource
#   BUCKET               gs://BUCKET/FOLDER for the code and the hosts' logs
#   DATA                 gs://BUCKET/FOLDER of data.prepare: each host copies it, for --data.source=/var/lib/tokensum/data
#   TYPE RUNTIME         v5litepod-16 v2-alpha-tpuv5-lite
#   SLICES=1             slices of that type; CAPACITY=spot, on-demand, reserved or flex-start
#   HOURS=24             everything ends that long after `create`, which includes the wait for the slices
#   SECRETS              names in Secret Manager, which become variables of train.py: "WANDB_API_KEY HF_TOKEN"
#   SERVICE_ACCOUNT      the hosts' account
set -euo pipefail
: "${NAME:?the name of the queued resource}" "${PROJECT:?the Google Cloud project}" "${ZONE:?such as us-west4-a}"
place=("$NAME" "--project=$PROJECT" "--zone=$ZONE" --quiet) tpus=(compute tpus queued-resources)

host_script() { # the hosts' startup script, with the arguments of train.py
    echo "#!/bin/bash"
    echo "mkdir -p /var/lib/tokensum; cat > /var/lib/tokensum/run.sh <<'END_OF_RUN'"
    printf '%s=%q\n' CODE "$code" LOGS "$BUCKET/logs" DEADLINE "@$deadline" LIMIT $((deadline + 1200)) \
        SECRETS "${SECRETS:-}" DATA "${DATA:-}"
    printf '%s=(%s)\n' TRAIN "$(printf '%q ' "$@")" \
        DELETE "$(printf '%q ' gcloud "${tpus[@]}" delete "${place[@]}" --force --async)"
    cat << 'END_OF_HOST'
export HOME=/root PATH=$PATH:/snap/bin DEADLINE
cd /var/lib/tokensum && rm -f loop.pid || exit
began=$EPOCHSECONDS
copy_log() { gcloud storage cp --quiet log "$LOGS/$(hostname)-$began.log"; }
delete() { while true; do copy_log; "${DELETE[@]}"; sleep "${PAUSE:-300}"; done; }
limit() { # also if the set-up or the run hangs
    while [ "$EPOCHSECONDS" -lt "$LIMIT" ]; do sleep "${PAUSE:-600}"; copy_log; done
    delete
}
set_up() {
    rm -rf code && mkdir code && gcloud storage cp "$CODE" - | tar -x -C code || return
    mkdir -p data && { [ -z "$DATA" ] || gcloud storage rsync --recursive "$DATA" data; } || return
    # Ubuntu 24.04 forbids pip otherwise (PEP 668), and older pips do not know the variable.
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --user --quiet uv &&
        ~/.local/bin/uv python install --quiet 3.12 &&
        make -C code setup EXTRA=tpu,gcs PYTHON="$(~/.local/bin/uv python find 3.12)" && touch ready
}
run() {
    for secret in $SECRETS; do
        value=$(gcloud secrets versions access latest --secret="$secret") || return
        export "$secret=$value"
    done
    code/launch/loop.sh "${TRAIN[@]}" &
    echo $! > loop.pid
    wait $!
}
limit &
if [ ! -e over ]; then
    { [ -e ready ] || set_up || set_up || set_up; } && run
    echo "the run is over with code $?: the slices are deleted in ten minutes" | tee over
fi
sleep "${PAUSE:-600}" # other hosts may still save
delete
END_OF_RUN
cat > /etc/systemd/system/tokensum.service << 'END_OF_UNIT'
[Unit]
Wants=network-online.target
After=network-online.target
[Service]
ExecStart=/bin/bash /var/lib/tokensum/run.sh
TimeoutStopSec=600
StandardOutput=append:/var/lib/tokensum/log
[Install]
WantedBy=multi-user.target
END_OF_UNIT
systemctl daemon-reload && systemctl enable --now tokensum
END_OF_HOST
}

create() {
    : "${BUCKET:?gs://BUCKET/FOLDER}" "${TYPE:?such as v5litepod-16}" "${RUNTIME:?such as v2-alpha-tpuv5-lite}" \
        "${SERVICE_ACCOUNT:?the account of the hosts}"
    case " $*" in *" --run_dir=gs://"*) ;; *) echo "error: --run_dir=gs://BUCKET/RUN is missing" >&2; exit 2 ;; esac
    if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
        echo "error: there are uncommitted changes, and only what is committed is copied" >&2
        exit 2
    fi
    local seconds=$((${HOURS:-24} * 3600)) script words=() alpha=()
    deadline=$((EPOCHSECONDS + seconds))
    case ${CAPACITY:-spot} in
        spot | reserved) words=("--${CAPACITY:-spot}") ;;
        flex-start) alpha=(alpha) words=(--provisioning-model=flex-start "--max-run-duration=${seconds}s") ;;
        on-demand) ;;
        *) echo "error: CAPACITY=$CAPACITY: take spot, on-demand, reserved or flex-start" >&2; exit 2 ;;
    esac
    if [ "${SLICES:-1}" -gt 1 ]; then words+=("--node-count=$SLICES"); else words+=("--node-id=$NAME"); fi
    code=$BUCKET/code-$(git rev-parse HEAD).tar
    git archive HEAD | gcloud storage cp - "$code"
    script=$(mktemp) && host_script "$@" > "$script"
    gcloud "${alpha[@]}" "${tpus[@]}" create "${place[@]}" "--accelerator-type=$TYPE" "--runtime-version=$RUNTIME" \
        "--valid-until-duration=${seconds}s" --scopes=https://www.googleapis.com/auth/cloud-platform \
        "--service-account=$SERVICE_ACCOUNT" "--metadata-from-file=startup-script=$script" "${words[@]}"
    rm "$script"
    echo "requested until $(date -d "@$deadline"). It may cost money until: launch/tpu_vm.sh delete"
}

state() { gcloud "${tpus[@]}" describe "${place[@]}" "--format=value(state.state)"; }
ssh_all() { gcloud "${tpus[@]}" ssh "${place[@]}" --node=all --worker=all "--command=$1"; }

# shellcheck disable=SC2016 # the hosts' own variables
case ${1:-} in
    create) create "${@:2}" ;;
    wait)
        until now=$(state); echo "$now"; [[ $now =~ ACTIVE|FAILED|SUSPENDED ]]; do sleep "${PAUSE:-30}"; done
        [ "$now" = ACTIVE ] ;; # another state will not become it
    status) state && ssh_all 'echo "$(hostname): $(systemctl is-active tokensum), $(tail -n 1 /var/lib/tokensum/log)"' ;;
    logs) ssh_all 'tail -n 100 -F /var/lib/tokensum/log | sed -u "s/^/$(hostname): /"' ;;
    delete)
        ssh_all 'cd /var/lib/tokensum && sudo kill $(cat loop.pid) && tail --pid=$(cat loop.pid) -f /dev/null' ||
            echo "not every host has answered: it may not have saved" >&2
        until names=$(gcloud "${tpus[@]}" list "${place[@]:1}" "--format=value(name.basename())") &&
            ! grep -qx "$NAME" <<< "$names"; do
            gcloud "${tpus[@]}" delete "${place[@]}" --force || echo "$NAME is not deleted: it MAY COST MONEY" >&2
            sleep "${PAUSE:-30}"
        done
        echo "$NAME is deleted" ;;
    *) echo "error: launch/tpu_vm.sh takes create, wait, status, logs or delete" >&2; exit 2 ;;
esac
