#!/usr/bin/env bash
# One or more nodes without a scheduler, by torchrun. The plan's tensor x pipeline x data must be
# GPUs per node x NODES. Run it on every node, with the same arguments but for NODE_RANK (0 to
# NODES - 1), within ten minutes; RUN is a directory that all nodes share. MASTER is the name or
# address of node 0, by which the others reach it:
#   scripts/train_nodes.sh 4 0 node-a PLAN META.json TOKENIZER.model RUN [options]   # on node-a
#   scripts/train_nodes.sh 4 1 node-a PLAN META.json TOKENIZER.model RUN [options]   # on node-b
# Run again with the same RUN, it goes on from the newest checkpoint.
#
# From the environment: GPUS_PER_NODE (8), MASTER_PORT (29500), and torchrun's own PET_* (for
# example PET_NUMA_BINDING=node binds each rank to the cores near its GPU; it needs numactl).
#
# SIGTERM or Ctrl-C to any node's torchrun saves a checkpoint on all nodes and ends: torchrun passes
# it on, waits --shutdown-timeout for its ranks, and exits with 1 though they have exited with 0.
# SIGTERM to a rank itself does the same, and torchrun exits with 0. A failed run exits with 1.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/job.sh
source "$root/scripts/job.sh"

read_job "$0 NODES NODE_RANK MASTER" "${@:4}"
nodes=$1 node_rank=$2 master=$3 gpus=${GPUS_PER_NODE:-8}
[[ $nodes =~ ^[1-9][0-9]*$ ]] || fail "NODES is '$nodes'; give a whole number from 1 on"
[[ $node_rank =~ ^(0|[1-9][0-9]*)$ && $node_rank -lt $nodes ]] ||
    fail "NODE_RANK is '$node_rank'; give each node another number, from 0 to $((nodes - 1))"
[[ $gpus =~ ^[1-9][0-9]*$ ]] || fail "GPUS_PER_NODE is '$gpus'; give a whole number from 1 on"
if [[ $nodes -gt 1 && $master =~ ^(|localhost|127\..*)$ ]]; then
    fail "MASTER is '$master'; give the name or address by which all $nodes nodes reach node 0"
fi

where=(--standalone)
if [[ $nodes -gt 1 ]]; then
    where=(--nnodes "$nodes" --node-rank "$node_rank" --master-addr "$master"
        --master-port "${MASTER_PORT:-29500}")
fi
# A checkpoint may take longer than torchrun's 30 s.
exec torchrun "${where[@]}" --nproc-per-node "$gpus" --shutdown-timeout 600 \
    "$root/pretrain_vlm.py" "${arguments[@]}"
