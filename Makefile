# Short names of the scripts; `make check` is what a change must pass before it is sent.
SHELL = bash
.PHONY: check format mutants planner-quick quick test

check:
	./scripts/check.sh

format:
	. ./scripts/environment.sh && python -m ruff check --fix . && python -m ruff format .

# Wrong changes of packing that no test notices: make mutants MUTANTS='omnibal.packing.isf.*'
mutants:
	. ./scripts/environment.sh && nice -n 10 mutmut run $(MUTANTS) && mutmut results

quick:
	./scripts/test.sh -m quick

planner-quick:
	./scripts/test.sh -m quick tests/planner

test:
	./scripts/test.sh
