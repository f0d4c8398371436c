#!/usr/bin/env bash
# Exported plans read by the trainers they are for, in an environment of its own. Arguments go to
# pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/trainers_environment.sh"
# ms-swift and datasets keep what they have read, by the name of its file.
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
export HF_HOME=$cache MODELSCOPE_CACHE=$cache HF_HUB_OFFLINE=1
.venv-trainers/bin/python -m pytest tests/trainers --override-ini testpaths= "$@"
