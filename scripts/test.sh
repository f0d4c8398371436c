#!/usr/bin/env bash
# All tests, in the quickstart's environment. Arguments are pytest's.
# Two processes, as most tests wait for forked ranks; they steal work from each other.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python -m pytest --numprocesses 2 --dist worksteal --durations 40 --durations-min 1 "$@"
