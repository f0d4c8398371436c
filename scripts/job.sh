# shellcheck shell=bash
# Sourced by the launchers: turns PLAN META.json TOKENIZER.model RUN [options] into the trainer's
# arguments, which go on from the newest checkpoint in RUN if there is one, and sets what each
# rank's environment needs. NCCL's own settings are the cluster's (NCCL_SOCKET_IFNAME, NCCL_IB_HCA,
# ...) and are passed on. None sets a time-out: the ranks watch each other.

# fail MESSAGE: a user's mistake ends the launcher as it ends the trainer.
fail() {
    echo "error: $1" >&2
    exit 2
}

# read_job USAGE ARGUMENTS...: fills `arguments`, and sets the number of hardware queues.
read_job() {
    local usage=$1 option options=()
    shift
    if [[ $# -lt 4 ]]; then
        echo "usage: $usage PLAN META.json TOKENIZER.model RUN [pretrain_vlm.py options]" >&2
        exit 2
    fi
    # With one hardware queue, kernels start in the order of their launches, so that a tensor-parallel
    # linear's exchange begins before the product that it shall run beside; core asks for it on devices
    # before Blackwell.
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    # shellcheck disable=SC2034  # the launcher's
    arguments=(--plan "$1" --data "$2" --tokenizer-model "$3" --save "$4")
    if [[ ! -e $4/latest_checkpointed_iteration.txt ]]; then
        arguments+=("${@:5}")
        return
    fi
    # What started from another run's weights goes on from its own; the last --load counts.
    for option in "${@:5}"; do
        [[ $option == --finetune ]] || options+=("$option")
    done
    arguments+=(${options[@]+"${options[@]}"} --load "$4")
}

# Checkpoints are agreed on over gloo, which takes the network of the host's name unless told. NCCL is
# told names in full after `=`, names' beginnings, or after `^` those to leave out.
if [[ ${NCCL_SOCKET_IFNAME:-^} != ^* ]]; then
    network=${NCCL_SOCKET_IFNAME%%[,:]*}
    [[ $network == =* ]] || network=$(cd /sys/class/net && compgen -G "$network*" | head -n 1) || true
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-${network#=}}"
fi
# Of the main process; the loader's workers have one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
# Kernels are loaded before training. Loaded at its first launch, one may wait for the whole device,
# on which a receive of NCCL waits for another rank, which may wait for this launch.
export CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING:-EAGER}"
# Packs differ in size: segments that grow leave no gaps between them, so that memory is seldom given
# back to the driver, which may wait for the whole device as well.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# A lost store is told in one line by the watch, and not in forty by torch.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
