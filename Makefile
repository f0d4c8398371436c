# One place for the checks; `make check` is what a change must pass before it is sent.
PYTHON ?= .venv/bin/python

.PHONY: check format test

check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(MAKE) test

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

test:
	./scripts/test.sh
