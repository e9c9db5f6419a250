# One command a job; `make help` lists them. Everything happens inside $(VENV), which each job makes if it is missing.
PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
ARGS ?=
ZOO ?=

GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)
ifeq ($(GPU),yes)
TORCH ?= torch>=2.11,<2.15
else
# PyPI's default torch is a CUDA build of several GB: without a GPU one pinned release is taken from the CPU index
TORCH ?= torch==2.13.0
endif
CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# the CPU index is only named if it answers, since pip waits long for a host that does not
PROBE := $(BIN)/python -c "import urllib.request as r; r.urlopen('$(CPU_INDEX)/', timeout=5)" >/dev/null 2>&1

.DEFAULT_GOAL := help
.PHONY: help env demo test test-gpu lint format types refusals bench coverage wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  Variables: PYTHON=python3.12  TORCH="torch==2.13.0"  VENV_FLAGS=--system-site-packages  ARGS="-k report" (test, demo, bench, coverage)  ZOO=folder (coverage)'

$(BIN)/.torch:
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@if [ "$(GPU)" != yes ] && $(PROBE); then index="--extra-index-url $(CPU_INDEX)"; fi; \
	echo '$(PIP) install "$(TORCH)"' $$index; $(PIP) install --quiet $$index "$(TORCH)"
	@touch $@

$(BIN)/.demo: $(BIN)/.torch pyproject.toml
	$(PIP) install --quiet -e . transformers
	@touch $@

$(BIN)/.test: $(BIN)/.torch pyproject.toml
	$(PIP) install --quiet -e '.[test]'
	@touch $@

$(BIN)/.dev: $(BIN)/.torch pyproject.toml
	$(PIP) install --quiet -e '.[dev]'
	@touch $@

env: $(BIN)/.dev ## make the development environment in .venv

demo: $(BIN)/.demo ## train and run an unmodified GPT-2: eager, inductor and flashattn side by side
	$(BIN)/python benchmarks/demo.py $(ARGS)

test: $(BIN)/.test ## run the tests (those that need a GPU are skipped without one)
	$(BIN)/python -m pytest $(ARGS)

test-gpu: $(BIN)/.test ## run only the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(BIN)/.dev ## ruff
	$(BIN)/ruff check .

format: $(BIN)/.dev ## let ruff rewrite the layout
	$(BIN)/ruff format .

types: $(BIN)/.dev ## mypy --strict on fa_inductor and patterns
	$(BIN)/mypy

refusals: $(BIN)/.dev ## write docs/refusals.md from the code
	$(BIN)/python -m fa_inductor.refusal_table > docs/refusals.md

bench: $(BIN)/.test ## the CPU attention benchmark and the compile-time benchmark; results go to benchmarks/results
	$(BIN)/python benchmarks/cpu_attention.py $(ARGS)
	$(BIN)/python benchmarks/compile_overhead.py

coverage: $(BIN)/.test ## measure the models of the folder ZOO (their packages must be installed) and write docs/coverage.md
	$(if $(ZOO),,$(error make coverage ZOO=folder with the models))
	$(BIN)/python benchmarks/coverage.py run --zoo $(ZOO) --out benchmarks/results/coverage.jsonl $(ARGS)
	$(BIN)/python benchmarks/coverage.py table benchmarks/results/coverage*.jsonl --out docs/coverage.md

wheel: $(BIN)/.dev ## build dist/*.whl and the source archive
	$(BIN)/python -m build

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
