# One front door. `make setup` is part of every other target and takes a second when there is nothing to do.
#
#   RFORK_VENV=/somewhere make …    use, and if need be make, the environment there instead of .venv

PYTHON ?= $(firstword $(shell command -v python3.11 python3 2>/dev/null))
RFORK_VENV ?= .venv
RFORK_VENV_COMPAT ?= .venv-0.5.16
PYTEST_ARGS ?=

BIN := $(RFORK_VENV)/bin
COMPAT_BIN := $(RFORK_VENV_COMPAT)/bin
FORMATTED := python platforms test tools setup.py

.DEFAULT_GOAL := help
.PHONY: help setup setup-tests demo check test faults test-compat format clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## Make the environment: SGLang, Mooncake and this checkout, to the version of the lock
	@RFORK_VENV=$(RFORK_VENV) $(PYTHON) tools/setup.py

setup-tests:
	@RFORK_VENV=$(RFORK_VENV) $(PYTHON) tools/setup.py --tests

demo: setup ## See a fork happen, on this machine, without a GPU
	@$(BIN)/rfork demo

check: setup-tests ## Lint, types, architecture and documents: a minute, before every commit
	$(BIN)/ruff check $(FORMATTED)
	$(BIN)/ruff format --check $(FORMATTED)
	$(BIN)/mypy
	$(BIN)/python -m pytest test/architecture -q $(PYTEST_ARGS)

test: check ## All of `check`, then every test against SGLang 0.5.23
	$(BIN)/python -m pytest test -m "not long" --ignore=test/architecture --ignore=test/compat $(PYTEST_ARGS)

faults: setup-tests ## Random faults for an hour or so: ten thousand in one process, twenty with real servers; keeps a tally
	$(BIN)/python -m pytest test -m long --ignore=test/compat $(PYTEST_ARGS)
	$(BIN)/python -m pytest test -m hypothesis --hypothesis-profile random --ignore=test/compat $(PYTEST_ARGS)
	$(BIN)/python tools/faults.py in-process --count 10000 --workers 2
	$(BIN)/python tools/faults.py process --count 20
	@$(BIN)/python tools/faults.py tally

test-compat: ## What must hold on SGLang 0.5.16, the oldest supported release, in an environment of its own
	@$(PYTHON) tools/setup.py --tests --lock requirements/sglang-0.5.16.txt --venv $(RFORK_VENV_COMPAT)
	$(COMPAT_BIN)/python -m pytest test/compat $(PYTEST_ARGS)

format: setup ## Rewrite the code as `check` wants it
	$(BIN)/ruff check --fix $(FORMATTED)
	$(BIN)/ruff format $(FORMATTED)

clean: ## Remove what builds and tests leave; environments stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	find . -name '*.egg-info' -not -path './.venv*' -prune -exec rm -rf {} +
