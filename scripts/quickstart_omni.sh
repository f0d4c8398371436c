#!/usr/bin/env bash
# From nothing to a model that reads digits and hears them, trained and examined on two CPU cores:
# makes .venv and digits that are shown, said by eSpeak NG, or both, then plans, trains and asks about
# held-out scans and voices, printing each command before it runs it. What an earlier run finished is
# kept; a training that was stopped goes on.
#   scripts/quickstart_omni.sh [pipeline|data-parallel]: where encoders run (default: pipeline)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

encoder=${1:-pipeline}
[[ $encoder =~ ^(pipeline|data-parallel)$ ]] || refuse "$encoder: must be pipeline or data-parallel"
work=work/quickstart_omni
data=$work/digits
tokenizer=$data/tokenizer.model
plan=$work/plan_$encoder
run=$work/run_$encoder
mkdir -p "$work"
source scripts/quickstart_steps.sh

make "$data" python tools/make_spoken_digits.py --output "$data" --samples 7000 --heldout-samples 400

caps=(--max-tiles 8 --limit clips=8 --max-tokens 320)
scan_and_profile internvl-digits-omni 12

make "$plan" omnibal plan --model internvl-digits-omni --cluster laptop-cpu --pp 2 \
    --precision fp32 --lengths $work/lengths.parquet --profile $work/profile.json "${caps[@]}" \
    --packing-levels 1 --micro-batches 3 --epochs 3 --encoder "$encoder" -o "$plan"

train_and_evaluate 20

show omnibal report "$plan" --run "$run" -o "$work/report_$encoder.html"
