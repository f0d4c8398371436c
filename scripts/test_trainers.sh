#!/usr/bin/env bash
# Tests of exported plans in their trainers, in a separate environment. Arguments are pytest's.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/trainers_environment.sh"
# ms-swift and datasets cache files by name.
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
export HF_HOME=$cache MODELSCOPE_CACHE=$cache HF_HUB_OFFLINE=1
.venv-trainers/bin/python -m pytest tests/trainers --override-ini testpaths= "$@"
