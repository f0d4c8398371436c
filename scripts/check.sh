#!/usr/bin/env bash
# All checks of a change, as in CI: lint, format, types, all tests, and exports in their trainers.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python -m ruff check .
python -m ruff format --check .
python -m mypy
./scripts/test.sh
./scripts/test_trainers.sh
