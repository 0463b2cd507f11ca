# The two commands of the README are `make demo` and `make test`; each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE_PYTHON := .engine/bin/python
# `make test VLLM=0` leaves out what needs real vLLM (a 3.5 GB environment, made once).
VLLM ?= 1
# Processes that share the tests on simulated engines, which wait more than they compute.
TEST_JOBS ?= 3

.DEFAULT_GOAL := help
.PHONY: docs reference help setup engine model test test-sim test-vllm unit contract scenarios check lint types format lock clean

help: ## this list
	@grep -hE '^[a-z][a-z0-9-]*:.*##' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

$(VENV)/.stamp: pyproject.toml requirements/dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; say which with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

setup: $(VENV)/.stamp ## the environment of the proxy and its tests (.venv)

engine: $(VENV)/.stamp ## real vLLM on the CPU in an environment of its own (.engine, 3.5 GB)
	$(BIN)/python scripts/build_engine_env.py $(if $(VLLM_PATH),--vllm $(VLLM_PATH))

model: engine ## the tiny model that demo and tests use (.models/tiny)
	$(ENGINE_PYTHON) -m engine_launcher.tiny_model .models/tiny

ifeq ($(VLLM),1)
TEST_NEEDS := engine model
PYTEST_VLLM :=
else
TEST_NEEDS :=
PYTEST_VLLM := -m "not vllm"
endif

# The environment of real vLLM is made while the other tests run; those that need it come last, alone on the machine.
test: $(VENV)/.stamp ## all checks and tests, those on real vLLM included
	$(MAKE) -j2 --no-print-directory --output-sync=target $(TEST_NEEDS) test-sim
	$(if $(TEST_NEEDS),$(MAKE) --no-print-directory test-vllm)

# What failed is run once more, alone: a loaded machine can miss a limit. What fails twice is a failure.
AGAIN := --last-failed --last-failed-no-failures none

test-sim: $(VENV)/.stamp lint types
	$(BIN)/python -m pytest -m "not vllm" -n $(TEST_JOBS) --durations=15 || $(BIN)/python -m pytest -m "not vllm" $(AGAIN)

test-vllm: $(VENV)/.stamp $(TEST_NEEDS)
	FLEETGATE_REQUIRE_VLLM=1 $(BIN)/python -m pytest -m vllm --durations=15 || \
		FLEETGATE_REQUIRE_VLLM=1 $(BIN)/python -m pytest -m vllm $(AGAIN)

unit: $(VENV)/.stamp ## the tests without I/O
	$(BIN)/python -m pytest tests/unit

contract: $(VENV)/.stamp $(TEST_NEEDS) ## the same cases on the simulated engine and on real vLLM
	FLEETGATE_REQUIRE_VLLM=$(VLLM) $(BIN)/python -m pytest tests/contract $(PYTEST_VLLM)

scenarios: $(VENV)/.stamp ## faults and syncs against simulated engines
	$(BIN)/python -m pytest tests/scenarios $(PYTEST_VLLM)

check: test ## what CI runs

lint: $(VENV)/.stamp ## ruff and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.stamp ## mypy --strict
	$(BIN)/mypy

format: $(VENV)/.stamp ## put the code into the house form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: $(VENV)/.stamp ## write docs/reference anew from the code
	$(BIN)/python scripts/generate_reference.py

docs: $(VENV)/.stamp ## the documentation as a site (site/), every link checked
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.lock
	$(BIN)/python scripts/generate_reference.py --check
	$(BIN)/mkdocs build --strict --quiet

lock: ## write the lock files anew from pyproject.toml (needs uv on the PATH)
	uv pip compile pyproject.toml --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url -q -o requirements/runtime.lock
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url -q -o requirements/dev.lock
	uv pip compile pyproject.toml --extra docs --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url -q -o requirements/docs.lock

clean: ## remove environments, models and results of runs
	rm -rf $(VENV) .engine .models .run .bench .clients .ray build site *.egg-info

-include scripts/*.mk
