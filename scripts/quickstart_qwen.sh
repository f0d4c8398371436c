#!/usr/bin/env bash
# Train and evaluate a small Qwen3-VL, or with --model qwen3.5 a small Qwen3.5, on two CPU cores: makes
# .venv, scanned digits in images of many sizes and a tokenizer with Qwen's chat template, then plans,
# trains, evaluates on held-out scans, exports for Transformers and trains adapters on the export,
# printing each command. Finished steps are kept; a stopped training resumes.
set -euo pipefail
model=qwen3-vl
[[ ${1-} == --model ]] && model=${2-}
if [[ $# -ne 0 && $# -ne 2 || ! $model =~ ^qwen3(-vl|\.5)$ ]]; then
    echo "$0 $*: give --model qwen3-vl (default) or --model qwen3.5" >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

work=work/quickstart_qwen
[[ $model == qwen3.5 ]] && work=work/quickstart_qwen3.5
tokenizer=$work/digits/tokenizer
plan=$work/plan run=$work/run
source scripts/quickstart_steps.sh

make "$data" python tools/make_native_digits.py --output "$data" --samples 6000

caps=(--limit image_tokens=160 --max-tokens 320)
scan_and_plan $model-digits 12

train_and_evaluate 16

make $work/exported python tools/convert.py export "$run" --layout $model \
    --tokenizer-model "$tokenizer" -o $work/exported

show omnibal report "$plan" --run "$run" -o $work/report.html

# Adapters on the exported model, for another task: the digit that comes next.
make $work/base python tools/convert.py import $work/exported -o $work/base

make $work/next.parquet omnibal lengths "$data/next/train/meta.json" --model $work/base/model.toml \
    --tokenizer-model $work/base/tokenizer -o $work/next.parquet

make $work/next_plan omnibal plan --model $work/base/model.toml --cluster laptop-cpu --pp 2 --precision fp32 \
    --lengths $work/next.parquet "${caps[@]}" --micro-batches 3 --epochs 4 --lora-rank 16 -o $work/next_plan

adapt=(torchrun --nproc-per-node 2 pretrain_vlm.py --plan $work/next_plan --tokenizer-model $work/base/tokenizer)

from=(--load $work/base --finetune)
[[ -e $work/adapted/latest_checkpointed_iteration.txt ]] && from=(--load $work/adapted)

make $work/adapted/trained "${adapt[@]}" --data "$data/next/train/meta.json" "${from[@]}" \
    --save $work/adapted --num-workers 1 --lr 2e-3 --min-lr 2e-4 --lr-warmup-fraction 0.05 --save-interval 100
touch $work/adapted/trained

make $work/adapted/evaluation.json "${adapt[@]}" --skip-train --load $work/adapted --save $work/adapted \
    --eval-data "$data/next/heldout/meta.json" --max-new-tokens 4

make $work/adapter python tools/convert.py export $work/adapted --adapter --like $work/exported -o $work/adapter
