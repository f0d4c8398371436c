#!/usr/bin/env bash
# Train and evaluate a small InternVL on two CPU cores: makes .venv and the sample data, then plans,
# trains, evaluates and reports with the commands of a real job, printing each. Finished steps are
# kept; a stopped training resumes.
#   scripts/quickstart.sh [SEED]: train with another seed, on the same plan
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[[ ${1:-0} =~ ^[0-9]+$ ]] || refuse "$1: a seed must be a whole number; give one, or none"
work=work/quickstart tokenizer=work/quickstart/digits/tokenizer.model
plan=$work/plan run=$work/run${1:+_$1}
source scripts/quickstart_steps.sh

make "$data" python tools/make_digits_dataset.py --output "$data"

caps=(--max-tiles 12 --max-tokens 448)
scan_and_plan internvl-digits 25

train_and_evaluate 16 --seed "${1:-42}"

make "$work/exported${1:+_$1}" python tools/convert.py export "$run" --layout transformers \
    --tokenizer-model "$tokenizer" -o "$work/exported${1:+_$1}"

show python tools/chat.py --load "$run" --tokenizer-model "$tokenizer" --precision fp32 \
    --image "$data/heldout/images/digits_single-00005-0.png" --prompt "Which digit is this?"

show omnibal report "$plan" --run "$run" -o "$work/report${1:+_$1}.html"
