#!/usr/bin/env bash
# What one GPU says of this project, in at most 9 minutes and without a network:
#   scripts/gpu_proof.sh OUT              writes OUT/proof.json and OUT/proof.html
#   scripts/gpu_proof.sh OUT --fake-device    the same parts without a GPU, as far as they go
#   WHEELS=FOLDER scripts/gpu_proof.sh OUT
# Takes .venv where it is there, else the Python that is active (PYTHON, or python3) if it has torch,
# with the wheels in WHEELS beside its own packages. Only without both is .venv made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [[ ! -e .venv/installed ]] && "$python" -c 'import torch' 2>/dev/null; then
    packages=
    if [[ -n ${WHEELS:-} ]]; then
        packages=$PWD/work/gpu_proof_packages
        wheels=("$WHEELS"/*.whl)
        # Its torch goes with the numpy that is there.
        if "$python" -c 'import sys, numpy; sys.exit(numpy.__version__ < "2")' 2>/dev/null; then
            for at in "${!wheels[@]}"; do
                if [[ ${wheels[at]##*/} == numpy-* ]]; then
                    unset "wheels[at]"
                fi
            done
        fi
        # Without their dependencies: the machine's own torch must stay.
        "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$packages" \
            "${wheels[@]}"
    fi
    export PYTHONPATH="$PWD${packages:+:$packages}${PYTHONPATH:+:$PYTHONPATH}"
else
    source scripts/environment.sh
    python=python
fi
exec "$python" -m scripts.gpu_proof "$@"
