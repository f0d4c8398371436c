#!/usr/bin/env bash
# Train on one node of 8 GPUs. Plan first, for 8 ranks (here 8 stages):
#   omnibal plan --model internvl-chat-1.5-6b-20b --cluster h100-80g --pp 8 \
#       --lengths lengths.parquet --max-tiles 15 --max-tokens 4608 --micro-batches 32 -o plan
# The same RUN resumes from its newest checkpoint. To stop it: train_nodes.sh.
set -euo pipefail
if [[ $# -lt 4 ]]; then
    echo "usage: $0 PLAN META.json TOKENIZER.model RUN [pretrain_vlm.py options]" >&2
    exit 2
fi
exec env GPUS_PER_NODE=8 "$(dirname "${BASH_SOURCE[0]}")/train_nodes.sh" 1 0 localhost "$@"
