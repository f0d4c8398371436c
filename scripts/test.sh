#!/usr/bin/env bash
# All tests, in the environment that the quickstart uses. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python -m pytest "$@"
