# Sourced by the quickstarts: settings for two CPU cores, and their common steps, which use $work,
# $tokenizer, $caps, $plan and $run.
data=$work/digits
mkdir -p "$work"

# On the CPU: two processes need two devices.
export CUDA_VISIBLE_DEVICES=
# Two processes share two cores: one thread each. Their loader processes run while they wait.
export OMP_NUM_THREADS=1

# Print a command and run it.
show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

# make PRODUCT COMMAND...: print and run a command unless its product exists.
make() {
    local product=$1
    shift
    if [[ -e $product ]]; then
        printf '\n# %s is there already\n' "$product"
        return
    fi
    show "$@"
}

# scan_and_plan MODEL REPETITIONS [OPTION]...: scan the data, profile the model, and plan with OPTIONs.
scan_and_plan() {
    make $work/lengths.parquet omnibal lengths "$data/train/meta.json" --model "$1" \
        --tokenizer-model "$tokenizer" -o $work/lengths.parquet
    make $work/profile.json omnibal profile --model "$1" --precision fp32 --processes 2 \
        "${caps[@]}" --lengths $work/lengths.parquet --data "$data/train/meta.json" \
        --tokenizer-model "$tokenizer" --repetitions "$2" -o $work/profile.json
    make "$plan" omnibal plan --model "$1" --cluster laptop-cpu --pp 2 --precision fp32 \
        --lengths $work/lengths.parquet --profile $work/profile.json "${caps[@]}" \
        --micro-batches 3 --epochs 3 "${@:3}" -o "$plan"
}

# train_and_evaluate MAX_NEW_TOKENS [OPTION]...: check the plan, train with OPTIONs, and evaluate.
train_and_evaluate() {
    local resume=() launch
    show omnibal check "$plan"
    [[ -e $run/latest_checkpointed_iteration.txt ]] && resume=(--load "$run")
    launch=(torchrun --nproc-per-node 2 pretrain_vlm.py --plan "$plan" --tokenizer-model "$tokenizer")
    make "$run/trained" "${launch[@]}" --data "$data/train/meta.json" --save "$run" ${resume[@]+"${resume[@]}"} \
        --num-workers 1 --lr 1e-3 --vision-lr 1e-3 --min-lr 5e-5 --lr-warmup-fraction 0.05 --adam-beta2 0.95 \
        --save-interval 100 "${@:2}"
    touch "$run/trained"
    make "$run/evaluation.json" "${launch[@]}" --skip-train --load "$run" --save "$run" \
        --eval-data "$data/heldout/meta.json" --max-new-tokens "$1"
}
