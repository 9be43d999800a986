#!/usr/bin/env bash
# From nothing to a network that answers, and a card of its results: DEPTH=12 launch/speedrun.sh
#
# Give one of
#   DEPTH=20                    nanochat's network of this depth
#   HOURS=4                     the deepest that trains within 4 hours on this machine (tools/depth.py)
#   DOLLARS=100 PRICE=3         the deepest that trains for 100 dollars, at 3 dollars a device and hour
#   TINY=1                      configs/small.py on text of this machine: ten minutes on two idle cores
# and, if you like,
#   REINFORCE=1                 also improve the answers by reinforcement; TINY=1 always does
#   PRICE=3                     show dollars on the card
#   RUN_CODE=1                  measure ChatCORE with HumanEval, whose programs run here (docs/evaluation.md)
#   CORE_BUNDLE=DIR CHAT_BUNDLE=DIR
#                               questions that are here, in place of a download
#   PREPARE_OPTIONS, PRETRAIN_OPTIONS, EVALUATE_OPTIONS, FINETUNE_OPTIONS, REINFORCE_OPTIONS
#                               more options of these commands: PRETRAIN_OPTIONS="--ratio=8 --batch.rows_per_device=16"
#   OUT=runs/speedrun-d20       the folder of the runs, the card (report.html) and the record of stages (stages.tsv)
#
# The same command again continues, at the stage that was interrupted. A stage that ended well is not repeated, unless
# its command changed. docs/speedrun.md explains the stages.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python=.venv/bin/python

say() { printf -- '--- %s\n' "$*"; }
refuse() {
    echo "error: $*" >&2
    exit 2
}

# ---- What was asked for
asked=0
for value in "${DEPTH:-}" "${HOURS:-}" "${DOLLARS:-}" "${TINY:-}"; do
    [ -z "$value" ] || asked=$((asked + 1))
done
[ "$asked" -eq 1 ] || refuse "give one of DEPTH, HOURS, DOLLARS and TINY: DEPTH=12 launch/speedrun.sh"
[ -z "${DOLLARS:-}" ] || [ -n "${PRICE:-}" ] || refuse "DOLLARS needs PRICE, the dollars a device and hour"

read -ra prepare_options <<< "${PREPARE_OPTIONS:-}"
read -ra pretrain_options <<< "${PRETRAIN_OPTIONS:-}"
read -ra evaluate_options <<< "${EVALUATE_OPTIONS:-}"
read -ra finetune_options <<< "${FINETUNE_OPTIONS:-}"
read -ra reinforce_options <<< "${REINFORCE_OPTIONS:-}"

# A signal ends the script once the command of its stage has ended: train.py saves first.
signalled=
trap 'signalled=130' INT
trap 'signalled=143' TERM

# A line of the record: stage, seconds, exit code, command.
record() { printf '%s\t%s\t%s\t%s\n' "$@" >> "$out/stages.tsv"; }

is_done() { # STAGE COMMAND
    local stage code command
    while IFS=$'\t' read -r stage _ code command; do
        [ "$stage $code $command" = "$1 0 $2" ] && return 0
    done < "$out/stages.tsv"
    return 1
}

run_stage() { # STAGE RESULT COMMAND...: RESULT is a file that the stage leaves
    local stage=$1 result=$2 began=$SECONDS code=0
    shift 2
    if [ -e "$result" ] && is_done "$stage" "$*"; then
        say "$stage: done before"
        return
    fi
    say "$stage: $*"
    "$@" || code=$?
    [ -z "$signalled" ] || code=$signalled
    record "$stage" $((SECONDS - began)) "$code" "$*"
    say "$stage: $((SECONDS - began)) s, exit code $code"
    [ "$code" -eq 0 ] || exit "$code"
}

evaluate() { # STAGE RUN BENCHMARK BUNDLE OPTION...
    local stage=$1 run=$2 benchmark=$3 bundle=$4
    shift 4
    if [ -z "$bundle" ]; then
        say "$stage: left out, since its questions are not here (CORE_BUNDLE, CHAT_BUNDLE)"
        return
    fi
    run_stage "$stage" "$run/$benchmark" "$python" evaluate.py --run_dir="$run" --tasks="$benchmark" --bundle="$bundle" \
        "$@" "${evaluate_options[@]}"
}

converse() { # SET SOURCE: prepare conversations with the network's tokenizer
    run_stage "conversations-$1" "$out/$1/dataset.json" "$python" -m data.prepare --conversations --source="$2" \
        --tokenizer="$base/tokenizer" --out="$out/$1"
}
tokens_in() { # SET
    "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["train"]["tokens"])' "$out/$1/dataset.json"
}
write_sums() {
    "$python" -m reinforcement.tasks > "$out/sums.jsonl.partial" && mv "$out/sums.jsonl.partial" "$out/sums.jsonl"
}
fetch_core() { # FOLDER
    curl --fail --location --retry 5 --output "$1.zip" \
        https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip &&
        unzip -q -o "$1.zip" -d "$(dirname "$1")"
}
fetch_chat() { # FOLDER
    local hf=(.venv/bin/hf download --repo-type=dataset)
    "${hf[@]}" allenai/ai2_arc --include='*/test*' --local-dir="$1/arc" &&
        "${hf[@]}" cais/mmlu --include='all/test*' --local-dir="$1/mmlu" &&
        "${hf[@]}" openai/gsm8k --include='main/*' --local-dir="$1/gsm8k" &&
        "${hf[@]}" openai/openai_humaneval --include='openai_humaneval/test*' --local-dir="$1/humaneval"
}

# ---- Set-up: `make` does nothing if it is complete.
say "set-up: make setup"
make setup || exit 2
seconds_of_setup=$SECONDS

# ---- Sizes
price=()
[ -z "${PRICE:-}" ] || price=("--price=$PRICE")
if [ -n "${TINY:-}" ]; then
    name=tiny
else
    limits=()
    [ -z "${DEPTH:-}" ] || limits=("--model.depth=$DEPTH")
    [ -z "${HOURS:-}" ] || limits=("--hours=$HOURS")
    [ -z "${DOLLARS:-}" ] || limits=("--dollars=$DOLLARS" "${price[@]}")
    chosen=$("$python" -m tools.depth --config=configs/nanochat.py "${limits[@]}" "${pretrain_options[@]}") || exit $?
    read -r depth tokens hours <<< "$chosen"
    say "depth $depth, $tokens tokens; hours of pretraining, by FLOPs: $hours"
    name=d$depth
fi
out=${OUT:-runs/speedrun-$name}
base=$out/base tuned=$out/chat reinforced=$out/reinforced
mkdir -p "$out" datasets || exit 2
touch "$out/stages.tsv"
record set-up "$seconds_of_setup" 0 "make setup"

# ---- Text and questions. A file of ClimbMix has 58 M tokens; some are held out, and packing drops a few.
core_bundle=${CORE_BUNDLE:-} chat_bundle=${CHAT_BUNDLE:-}
if [ -n "${TINY:-}" ]; then
    pretrain=(--config=configs/small.py)
else
    files=$((tokens / 52000000 + 1))
    dataset=datasets/climbmix-$files
    run_stage tokens "$dataset/dataset.json" "$python" -m data.prepare --source=hf:karpathy/climbmix-400b-shuffle \
        --max_files=$files --val_fraction=0.005 --out="$dataset" "${prepare_options[@]}"
    pretrain=(--config=configs/nanochat.py "--model.depth=$depth" "--data.source=$dataset")
    if [ -z "$core_bundle" ]; then
        core_bundle=datasets/eval_bundle
        run_stage core-questions $core_bundle/core.yaml fetch_core $core_bundle
    fi
    if [ -z "$chat_bundle" ]; then
        chat_bundle=datasets/chat_bundle
        run_stage chat-questions $chat_bundle fetch_chat $chat_bundle
    fi
fi

# ---- Pretraining, and CORE
run_stage pretraining "$base/summary.json" launch/loop.sh "${pretrain[@]}" --run_dir="$base" --name="$name" \
    "${pretrain_options[@]}"
evaluate core "$base" core "$core_bundle"

# ---- Conversations, fine-tuning, and ChatCORE
if [ -n "${TINY:-}" ]; then
    run_stage sums "$out/sums.jsonl" write_sums
    converse sums "$out/sums.jsonl"
    mixture=("--data.source=0.8:chat-stdlib,0.2:$out/sums" --batch.rows_per_device=8)
else
    converse smoltalk 'hf:HuggingFaceTB/smol-smoltalk:data/train*'
    converse mmlu 'hf:cais/mmlu:all/auxiliary_train*'
    converse gsm8k 'hf:openai/gsm8k:main/train*'
    # nanochat's mixture: SmolTalk once, MMLU three times, GSM8K four times.
    smoltalk=$(tokens_in smoltalk) mmlu=$(tokens_in mmlu) gsm8k=$(tokens_in gsm8k)
    once=$((smoltalk + mmlu + gsm8k)) mixed=$((smoltalk + 3 * mmlu + 4 * gsm8k))
    mixture=("--data.source=$smoltalk:$out/smoltalk,$((3 * mmlu)):$out/mmlu,$((4 * gsm8k)):$out/gsm8k"
        "--epochs=$(awk "BEGIN { printf \"%.4f\", $mixed / $once }")")
fi
run_stage fine-tuning "$tuned/summary.json" launch/loop.sh --config=configs/chat.py --init_from="$base" "${mixture[@]}" \
    --run_dir="$tuned" --name="$name-chat" "${finetune_options[@]}"
chatcore=(chatcore4 "$chat_bundle")
[ -z "${RUN_CODE:-}" ] || chatcore=(chatcore "$chat_bundle" --run_code)
evaluate chatcore "$tuned" "${chatcore[@]}"

# ---- Reinforcement, and ChatCORE again
runs=("$base" "$tuned")
if [ -n "${REINFORCE:-}${TINY:-}" ]; then
    task=(--reinforce.task=gsm8k "--eval.bundle=$chat_bundle")
    [ -z "${TINY:-}" ] || task=(--reinforce.task=sums --steps=30 --eval.every_steps=30)
    run_stage reinforcement "$reinforced/summary.json" "$python" reinforce.py --config=configs/reinforce.py \
        --init_from="$tuned" "${task[@]}" --run_dir="$reinforced" --name="$name-reinforced" "${reinforce_options[@]}"
    evaluate chatcore-reinforced "$reinforced" "${chatcore[@]}"
    runs+=("$reinforced")
fi

# ---- The card
"$python" -m tools.report "${runs[@]}" --stages="$out/stages.tsv" --out="$out/report.html" "${price[@]}" || exit $?
awk -F'\t' '
    { if (!($1 in seconds)) stages[++count] = $1; seconds[$1] += $2; all += $2 }
    END {
        for (i = 1; i <= count; i++) printf "%-24s%8d s\n", stages[i], seconds[stages[i]]
        printf "%-24s%8d s\n", "all", all
    }' "$out/stages.tsv"
say "the card: $out/report.html"
say "chat:     $python chat.py --run_dir=${runs[-1]}"
