# Short names of the scripts; `make check` is what a change must pass before it is sent.
SHELL = bash
.PHONY: check compose format fuzz goals gpu-bundle mutants planner-quick quick test

check:
	./scripts/check.sh

format:
	. ./scripts/environment.sh && python -m ruff check --fix . && python -m ruff format .

# Properties with 1,000 random examples each, in place of the same 40 in every run.
fuzz:
	./scripts/test.sh -m hypothesis --hypothesis-profile random

# Combinations of features, drawn at random: make compose DRAWS=20 SEED=1
DRAWS = 1000
SEED = $(shell date +%s)
compose:
	./scripts/test.sh tests/training/test_composed.py --draws $(DRAWS) --seed $(SEED)

# Random goals, of which freedom, memory and devices must not make the plan slower: make goals DRAWS=500
goals:
	./scripts/test.sh tests/planner/test_freedom.py --draws $(DRAWS) --seed $(SEED)

# For scripts/gpu_proof.sh on a machine without a network: make gpu-bundle BUNDLE=FOLDER
BUNDLE = work/gpu_bundle
gpu-bundle:
	./scripts/gpu_bundle.sh "$(BUNDLE)"

# Wrong changes of packing that no test notices: make mutants MUTANTS='omnibal.packing.isf.*'
mutants:
	. ./scripts/environment.sh && nice -n 10 mutmut run $(MUTANTS) && mutmut results

quick:
	./scripts/test.sh -m quick

planner-quick:
	./scripts/test.sh -m quick tests/planner

test:
	./scripts/test.sh
