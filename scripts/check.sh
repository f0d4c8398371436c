#!/usr/bin/env bash
# What a change must pass before it is sent, and what CI runs: lint, format, types, all tests, and
# exports read by the trainers they are for.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python -m ruff check .
python -m ruff format --check .
python -m mypy
./scripts/test.sh
./scripts/test_trainers.sh
