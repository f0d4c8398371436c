#!/usr/bin/env bash
# Exported plans read by the trainers they are for, in an environment of its own. Arguments go to
# pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/trainers_environment.sh"
exec .venv-trainers/bin/python -m pytest tests/trainers --override-ini testpaths= "$@"
