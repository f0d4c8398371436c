#!/usr/bin/env bash
# Check and measure this project on one GPU, in at most 9 minutes and without a network:
#   scripts/gpu_proof.sh OUT                  writes OUT/card.md and OUT/card.json
#   scripts/gpu_proof.sh OUT --fake-device    the same parts without a GPU, in five minutes
#   WHEELS=FOLDER scripts/gpu_proof.sh OUT    with the folder of `make gpu-bundle`
# Uses .venv if it exists, else the active Python (PYTHON, or python3) if it has torch, with the
# packages in WHEELS before its own, else makes .venv.
set -euo pipefail
if [[ -n ${WHEELS:-} ]] && ! WHEELS=$(cd "$WHEELS" 2>/dev/null && pwd); then
    echo "error: WHEELS is no folder that can be read; give that of \`make gpu-bundle\`" >&2
    exit 2
fi
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3} packages=
if [[ ! -e .venv/installed ]] && "$python" -c 'import torch' 2>/dev/null; then
    if [[ -n ${WHEELS:-} ]]; then
        # Unpacked, as such a Python may lack pip, and its torch must stay.
        packages=$PWD/work/gpu_proof_packages
        rm -rf "$packages"
        for file in "$WHEELS"/packages.tar.xz "$WHEELS"/*.whl; do
            [[ -e $file ]] || continue
            case $file in
            *.whl) "$python" -m zipfile -e "$file" "$packages" ;;
            *) "$python" -m tarfile --filter data -e "$file" "$packages" ;;
            esac
        done
        # Its torch was built for its own numpy.
        if "$python" -c 'import sys, numpy; sys.exit(numpy.__version__ < "2")' 2>/dev/null; then
            rm -rf "$packages"/numpy "$packages"/numpy[.-]*
        fi
        [[ ! -e $WHEELS/digits ]] || set -- "$@" --digits "$WHEELS/digits"
    fi
else
    source scripts/environment.sh
    python=python
fi
export PYTHONPATH="$PWD${packages:+:$packages}${PYTHONPATH:+:$PYTHONPATH}"
cd "$here"
exec "$python" -m scripts.gpu_proof "$@"
