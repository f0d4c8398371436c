#!/usr/bin/env bash
# All tests, in the environment that the quickstart uses. Arguments go to pytest.
# Two processes take tests from each other: most of the suite waits for one forked rank or another.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python -m pytest --numprocesses 2 --dist worksteal --durations 40 --durations-min 1 "$@"
