# Sourced by the quickstarts: how they run on two CPU cores, and how they run a step once.

# A GPU, if there is one, could not hold two processes' devices: this is a job for the CPU.
export CUDA_VISIBLE_DEVICES=
# Two processes share two cores: one thread each. The loader process of each takes what cores they
# leave while they wait.
export OMP_NUM_THREADS=1

# Print a command and run it.
show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

# The same, unless what it makes is there.
make() {
    local product=$1
    shift
    if [[ -e $product ]]; then
        printf '\n# %s is there already\n' "$product"
        return
    fi
    show "$@"
}
