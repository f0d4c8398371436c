#!/usr/bin/env bash
# Train and evaluate a model of images and recordings on two CPU cores: makes .venv and digits shown,
# spoken by eSpeak NG, or both, then plans, trains and evaluates on held-out scans and voices, printing
# each command. Finished steps are kept; a stopped training resumes.
#   scripts/quickstart_omni.sh [pipeline|data-parallel]: where encoders run (default: pipeline)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

encoder=${1:-pipeline}
[[ $encoder =~ ^(pipeline|data-parallel)$ ]] || refuse "$encoder: must be pipeline or data-parallel"
work=work/quickstart_omni tokenizer=work/quickstart_omni/digits/tokenizer.model
plan=$work/plan_$encoder run=$work/run_$encoder
source scripts/quickstart_steps.sh

make "$data" python tools/make_spoken_digits.py --output "$data" --samples 7000 --heldout-samples 400

caps=(--max-tiles 8 --limit clips=8 --max-tokens 320)
scan_and_plan internvl-digits-omni 12 --packing-levels 1 --encoder "$encoder"

train_and_evaluate 20

show omnibal report "$plan" --run "$run" -o "$work/report_$encoder.html"
