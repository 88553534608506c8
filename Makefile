# Everything runs in .venv, made on first use. Only Python 3.11+, make and a package index are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What `make demo` hands to `zfabric demo`: make demo ENGINE=sim MODEL=name ARGS='--items 500'
ENGINE ?=
MODEL ?=
ARGS ?=
# How often `make soak` kills the broker.
KILLS ?= 200
# How many seeds `make sim` runs.
SEEDS ?= 10000

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check soak sim clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 14

setup: $(STAMP) ## make .venv and install zfabric with pinned versions

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'zfabric needs Python 3.11 or newer and $(PYTHON) is not (or is missing): try make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(STAMP) ## broker, two workers and a batch file through them (ENGINE, MODEL, ARGS)
	$(BIN)/zfabric demo $(if $(ENGINE),--engine $(ENGINE)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: check ## every check and every test
	$(BIN)/python -m pytest

check: $(STAMP) ## the quick part of it: style, types, import contracts, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/test_style.py

soak: $(STAMP) ## a loaded broker killed 200 times (KILLS), and a crash at every point of a run
	SOAK_KILLS=$(KILLS) $(BIN)/python -m pytest -q -s tests/test_soak.py --timeout 3600
	CRASH_POINTS=all $(BIN)/python -m pytest -q tests/test_crash_points.py --timeout 3600

sim: $(STAMP) ## the whole fabric simulated, 10,000 seeds of faults (SEEDS)
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

clean: ## remove what make has made, .venv too
	rm -rf $(VENV) build dist demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
