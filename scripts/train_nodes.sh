#!/usr/bin/env bash
# Train on nodes without a scheduler, by torchrun. The plan's tensor x pipeline x data must be GPUs per
# node x NODES. Run it on every node within ten minutes, with the same arguments except NODE_RANK (0
# to NODES - 1). RUN is a shared directory, and MASTER the name or address of node 0:
#   scripts/train_nodes.sh 4 0 node-a PLAN META.json TOKENIZER.model RUN [options]   # on node-a
#   scripts/train_nodes.sh 4 1 node-a PLAN META.json TOKENIZER.model RUN [options]   # on node-b
# The same RUN resumes from its newest checkpoint.
#
# With NODES as MIN:MAX, training starts with at least MIN nodes and plans for them (pretrain_vlm.py
# --elastic); when a node fails or joins, it resumes from the newest checkpoint with the present
# nodes. NODE_RANK is then 0 on MASTER, which must stay, and any other number elsewhere.
#
# Environment: GPUS_PER_NODE (8), MASTER_PORT (29500), and torchrun's PET_* (PET_NUMA_BINDING=node
# binds each rank to the cores near its GPU, with numactl).
#
# SIGTERM, SIGUSR1, SIGHUP or Ctrl-C to any node's torchrun saves a checkpoint on all nodes and ends:
# torchrun forwards it, waits ten minutes for its ranks, and exits with 1 although they exit with 0.
# After SIGTERM to a rank torchrun exits with 0. A failed run exits with 1.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/job.sh
source "$root/scripts/job.sh"

read_job "$0 NODES NODE_RANK MASTER" "${@:4}"
nodes=$1 node_rank=$2 master=$3 gpus=${GPUS_PER_NODE:-8}
[[ $nodes =~ ^([1-9][0-9]*:)?[1-9][0-9]*$ ]] ||
    fail "NODES is '$nodes'; give a whole number from 1 on, or two as MIN:MAX"
most=${nodes#*:}
[[ $node_rank =~ ^(0|[1-9][0-9]*)$ && $node_rank -lt $most ]] ||
    fail "NODE_RANK is '$node_rank'; give each node another number, from 0 to $((most - 1))"
[[ $gpus =~ ^[1-9][0-9]*$ ]] || fail "GPUS_PER_NODE is '$gpus'; give a whole number from 1 on"
if [[ $most -gt 1 && $master =~ ^(|localhost|127\..*)$ ]]; then
    fail "MASTER is '$master'; give the name or address by which all $nodes nodes reach node 0"
fi

where=(--standalone)
if [[ $nodes == *:* ]]; then
    # More restarts than a long run has faults; each resumes from the newest checkpoint.
    where=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-id omnibal
        --rdzv-endpoint "$master:${MASTER_PORT:-29500}" --max-restarts 100)
    [[ $node_rank -ne 0 ]] || where+=(--rdzv-conf is_host=true)
    arguments+=(--elastic)
elif [[ $nodes -gt 1 ]]; then
    where=(--nnodes "$nodes" --node-rank "$node_rank" --master-addr "$master"
        --master-port "${MASTER_PORT:-29500}")
fi
# A checkpoint may take longer than torchrun's 30 s. A variable, since torchrun before 2.12 refuses
# the option.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
exec torchrun "${where[@]}" --nproc-per-node "$gpus" \
    "$root/pretrain_vlm.py" "${arguments[@]}"
