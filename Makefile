# Short names of the scripts; `make check` is what a change must pass before it is sent.
SHELL = bash
.PHONY: check format fuzz mutants planner-quick quick test

check:
	./scripts/check.sh

format:
	. ./scripts/environment.sh && python -m ruff check --fix . && python -m ruff format .

# Properties with 1,000 random examples each, in place of the same 40 in every run.
fuzz:
	./scripts/test.sh -m hypothesis --hypothesis-profile random

# Wrong changes of packing that no test notices: make mutants MUTANTS='omnibal.packing.isf.*'
mutants:
	. ./scripts/environment.sh && nice -n 10 mutmut run $(MUTANTS) && mutmut results

quick:
	./scripts/test.sh -m quick

planner-quick:
	./scripts/test.sh -m quick tests/planner

test:
	./scripts/test.sh
