# Every target does its own set-up in .venv; nothing but Python 3.11+ is needed before.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: help demo test test-all test-vllm test-sglang check format coverage clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "moegraft needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## four adapters and base rows in one batch, on a small trained model
	$(BIN)/moegraft demo

test: $(STAMP) ## the test suite (under 10 minutes on 2 cores)
	$(PYTEST) -m "not slow and not gpu"

test-all: $(STAMP) ## the test suite with its long tests
	$(PYTEST) -m "not gpu"

test-vllm: ## the vLLM plugin inside a real vLLM on the CPU, in .venv-vllm (3.5 GB, up to 20 minutes)
	PYTHON=$(PYTHON) tests/vllm_plugin/run.sh

test-sglang: ## the SGLang plugin with the real package's classes on the CPU, in .venv-sglang (6 GB)
	PYTHON=$(PYTHON) tests/sglang_plugin/run.sh

check: $(STAMP) ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(STAMP) ## line coverage of src/ by the CPU tests (at least 90 %)
	$(PYTEST) -m "not gpu" --cov=moegraft --cov-report=term-missing:skip-covered --cov-fail-under=90

clean: ## remove the environment and caches
	rm -rf $(VENV) .venv-vllm .venv-sglang .pytest_cache .mypy_cache .ruff_cache .coverage build
