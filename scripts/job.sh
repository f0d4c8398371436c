# shellcheck shell=bash
# Sourced by the launchers: turns PLAN META.json TOKENIZER.model RUN [options] into the trainer's
# arguments, resuming from the newest checkpoint in RUN, and sets the ranks' environment. NCCL's
# settings (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, ...) are the cluster's. There is no time-out: the ranks
# watch each other.

# fail MESSAGE: end the launcher like the trainer on a user's mistake.
fail() {
    echo "error: $1" >&2
    exit 2
}

# read_job USAGE ARGUMENTS...: fill `arguments`, and set the number of hardware queues.
read_job() {
    local usage=$1 option options=()
    shift
    if [[ $# -lt 4 ]]; then
        echo "usage: $usage PLAN META.json TOKENIZER.model RUN [pretrain_vlm.py options]" >&2
        exit 2
    fi
    # With one hardware queue, kernels start in launch order, so that a tensor-parallel linear's
    # exchange begins before the product that overlaps it; core requires it before Blackwell.
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    # shellcheck disable=SC2034  # the launcher's
    arguments=(--plan "$1" --data "$2" --tokenizer-model "$3" --save "$4")
    if [[ ! -e $4/latest_checkpointed_iteration.txt ]]; then
        arguments+=("${@:5}")
        return
    fi
    # A run that started from another run's weights resumes from its own; the last --load counts.
    for option in "${@:5}"; do
        [[ $option == --finetune ]] || options+=("$option")
    done
    arguments+=(${options[@]+"${options[@]}"} --load "$4")
}

# Checkpoints use gloo, which by default takes the network of the host's name. NCCL's variable has
# full names after `=`, else prefixes of names, or after `^` names to exclude.
if [[ ${NCCL_SOCKET_IFNAME:-^} != ^* ]]; then
    network=${NCCL_SOCKET_IFNAME%%[,:]*}
    [[ $network == =* ]] || network=$(cd /sys/class/net && compgen -G "$network*" | head -n 1) || true
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-${network#=}}"
fi
# For the main process; loader workers have one thread.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
# Load kernels before training: a load at first launch may synchronize the device, where a receive of
# NCCL waits for another rank, which may wait for this launch: a deadlock.
export CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING:-EAGER}"
# Packs differ in size: growing segments avoid fragmentation, so memory is rarely returned to the
# driver, which may synchronize the device too.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# The watch reports a lost store in one line; torch's forty lines are off.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
