#!/usr/bin/env bash
# From nothing to a trained and examined model on two CPU cores: makes .venv and the sample data,
# then plans, trains, evaluates and reports with the commands that a real job uses, printing each
# before it runs. What an earlier run finished is kept; a training that was stopped goes on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

work=work/quickstart
data=$work/digits
tokenizer=$data/tokenizer.model
plan=$work/plan
run=$work/run
mkdir -p "$work"
source scripts/quickstart_steps.sh

make "$data" python tools/make_digits_dataset.py --output "$data"

make $work/lengths.parquet omnibal lengths "$data/train/meta.json" --model internvl-digits \
    --tokenizer-model "$tokenizer" -o $work/lengths.parquet

caps=(--max-tiles 12 --max-tokens 448)

make $work/profile.json omnibal profile --model internvl-digits --precision fp32 --processes 2 \
    "${caps[@]}" --lengths $work/lengths.parquet --data "$data/train/meta.json" \
    --tokenizer-model "$tokenizer" --repetitions 25 -o $work/profile.json

make "$plan" omnibal plan --model internvl-digits --cluster laptop-cpu --pp 2 --precision fp32 \
    --lengths $work/lengths.parquet --profile $work/profile.json "${caps[@]}" \
    --micro-batches 3 --epochs 3 -o "$plan"

show omnibal check "$plan"

resume=()
[[ -e $run/latest_checkpointed_iteration.txt ]] && resume=(--load "$run")
launch=(torchrun --nproc-per-node 2 pretrain_vlm.py --plan "$plan" --tokenizer-model "$tokenizer")

make "$run/trained" "${launch[@]}" --data "$data/train/meta.json" --save "$run" ${resume[@]+"${resume[@]}"} \
    --num-workers 1 --lr 1e-3 --min-lr 5e-5 --lr-warmup-fraction 0.05 --adam-beta2 0.95 --save-interval 100
touch "$run/trained"

make "$run/evaluation.json" "${launch[@]}" --skip-train --load "$run" --save "$run" \
    --eval-data "$data/heldout/meta.json" --max-new-tokens 16

make $work/exported python tools/convert.py export "$run" --layout transformers \
    --tokenizer-model "$tokenizer" -o $work/exported

show python tools/chat.py --load "$run" --tokenizer-model "$tokenizer" --precision fp32 \
    --image "$data/heldout/images/digits_single-00005-0.png" --prompt "Which digit is this?"

show omnibal report "$plan" --run "$run" -o $work/report.html
