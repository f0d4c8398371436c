#!/usr/bin/env bash
# One node of 8 GPUs. Plan first, for as many ranks (here 8 stages):
#   omnibal plan --model internvl-chat-1.5-6b-20b --cluster h100-80g --pp 8 \
#       --lengths lengths.parquet --max-tiles 15 --max-tokens 4608 --micro-batches 32 -o plan
set -euo pipefail
if [[ $# -lt 4 ]]; then
    echo "usage: $0 PLAN META.json TOKENIZER.model RUN [pretrain_vlm.py options]" >&2
    exit 2
fi
plan=$1 data=$2 tokenizer=$3 run=$4
shift 4
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec torchrun --standalone --nproc-per-node 8 "$root/pretrain_vlm.py" \
    --plan "$plan" --data "$data" --tokenizer-model "$tokenizer" --save "$run" "$@"
