# Everything runs in .venv, which is made on first use and again when its requirements change. PYTHON chooses the
# interpreter (3.11 or newer for development), ARGS goes to the command that a target runs.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready
CONSTRAINTS := requirements/constraints.txt
# Real engines, and verl, have environments of their own; tests start them there.
VLLM := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready
SGLANG_READY := .venv-sglang-0510/.ready .venv-sglang-0523/.ready
VERL_READY := .venv-verl/.ready

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help venv vllm sglang verl demo test fast lint format bench

help:
	@echo 'make venv    make .venv with everything that development needs'
	@echo 'make vllm    make .venv-vllm, in which tests run a real vLLM on the CPU'
	@echo 'make sglang  make .venv-sglang-0510 and .venv-sglang-0523, likewise for SGLang'
	@echo 'make verl    make .venv-verl, for tests with the classes of verl'
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
	# A baseline of tests/checkpoint, without what it declares: pynvml makes every import of torch warn.
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-deps 'nvidia-resiliency-ext; python_version < "3.13"'
	touch $@

vllm: $(VLLM_READY)

$(VLLM_READY): pyproject.toml requirements/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --requirement requirements/vllm.txt
	$(VLLM)/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(VLLM)/python -m pip install --quiet --no-deps --editable .
	touch $@

sglang: $(SGLANG_READY)

.venv-sglang-0510/.ready: requirements/sglang-0.5.10.txt
.venv-sglang-0523/.ready: requirements/sglang-0.5.23.txt
$(SGLANG_READY):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement $<
	touch $@

verl: $(VERL_READY)

$(VERL_READY): requirements/verl.txt
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet --no-deps --requirement $<
	touch $@

demo: $(READY)
	$(BIN)/python -m examples.demo $(ARGS)

test: $(READY) $(VLLM_READY) $(SGLANG_READY) $(VERL_READY)
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
