# Everything runs in .venv, which is made on first use and again when its requirements change. PYTHON chooses the
# interpreter (3.11 or newer for development), ARGS goes to the command that a target runs.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready
CONSTRAINTS := requirements/constraints.txt

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help venv demo test fast lint format bench

help:
	@echo 'make venv    make .venv with everything that development needs'
	@echo 'make demo    train a tiny model and publish every step to two engines'
	@echo 'make test    all tests'
	@echo 'make fast    tests without processes, engines and slow ones (ARGS=... goes to pytest)'
	@echo 'make lint    ruff and mypy'
	@echo 'make format  let ruff format'
	@echo 'make bench   weightsync bench (ARGS=... are its options)'

venv: $(READY)

# pip learnt of dependency groups in 25.1, so the pinned pip comes first.
$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --group dev --editable '.[megatron,plot]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

fast: $(READY)
	$(BIN)/python -m pytest -m 'not multiproc and not engine and not slow' $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/weightsync bench $(ARGS)
