# FluidPD. `make` alone lists the targets. Needs make and Python 3.11 or newer; everything else goes into .venv.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/fluidpd.stamp
ARGS  ?=
PYTEST_ARGS ?=
# Most of these tests wait for processes: two at a time. A file is one process's, for what its tests share.
PARALLEL ?= -n 2 --dist loadfile

# The first interpreter that really runs, is new enough, and can make a virtual environment. `make setup PYTHON=...` overrides.
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3 python)
CHECK := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types imports unit faults test-gpu test-sglang soak soak-faults soak-sglang format bench wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | \
	  while IFS='|' read -r target text; do printf '%-20s %s\n' "$$target" "$$text"; done

setup: $(STAMP) ## create .venv with everything the demo and the tests need (quick when up to date)

$(STAMP): pyproject.toml
	@set -e; \
	if ! $(BIN)/python -c '$(CHECK)' >/dev/null 2>&1; then \
	  for p in $(CANDIDATES); do \
	    if "$$p" -c '$(CHECK)' >/dev/null 2>&1; then python="$$p"; break; fi; \
	  done; \
	  if [ -z "$${python:-}" ]; then \
	    echo "setup: no usable Python 3.11 or newer among: $(CANDIDATES)." >&2; \
	    echo "       Install one with its venv module (Debian, Ubuntu: apt-get install python3 python3-venv)," >&2; \
	    echo "       or name one: make setup PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	  fi; \
	  echo "setup: creating $(VENV) with $$($$python --version)"; \
	  "$$python" -m venv --clear $(VENV); \
	fi; \
	echo "setup: installing FluidPD and its tools into $(VENV) (a few minutes the first time)"; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --retries 5 --upgrade 'pip>=25.1'; \
	$(BIN)/python -m pip install -qq --retries 5 --editable '.[router]' --group dev; \
	touch $(STAMP)

demo: setup ## a fleet on this machine, static against FluidPD, with the dashboard; ARGS="--engine sglang": the real SGLang on a CPU
	@$(BIN)/fluidpd demo $(ARGS)

test: setup lint types imports unit ## everything CI checks: ruff, mypy, import contracts, pytest

lint: setup ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy --strict over the packages
	$(BIN)/mypy

imports: setup ## the import contracts of docs/architecture.md
	$(BIN)/lint-imports --no-logo

unit: setup ## pytest alone; options in PYTEST_ARGS (PARALLEL= for one test at a time)
	$(BIN)/pytest $(PARALLEL) $(PYTEST_ARGS)

faults: setup ## processes killed, stopped and starved in every phase of a move, under load (FLUIDPD_SEED)
	FLUIDPD_TEST=faults $(BIN)/pytest -m faults $(PARALLEL) tests/faults tests/fleet $(PYTEST_ARGS)

test-gpu: setup ## the tests that need an NVIDIA GPU
	$(BIN)/python -m pip install --quiet --editable '.[gpu]'
	FLUIDPD_TEST=gpu $(BIN)/pytest -m gpu $(PYTEST_ARGS)

test-sglang: setup ## the tests on the real SGLang, on a CPU: installed once, in a cache folder (2 minutes, 1.8 GB)
	FLUIDPD_TEST=sglang $(BIN)/pytest -m sglang tests/sglang tests/engine_contract $(PYTEST_ARGS)

soak: soak-faults soak-sglang ## both long runs below (FLUIDPD_SOAK_S, FLUIDPD_SEED)

soak-faults: setup ## a simulated day of the controller in which nothing may grow, and 5 minutes of random faults
	FLUIDPD_TEST=soak FLUIDPD_SOAK_S=$${FLUIDPD_SOAK_S:-300} $(BIN)/pytest -m soak tests/faults $(PYTEST_ARGS)

soak-sglang: setup ## the real SGLang under random claims, handoffs, moves and disconnects, 5 minutes
	FLUIDPD_TEST=soak FLUIDPD_SOAK_S=$${FLUIDPD_SOAK_S:-300} $(BIN)/pytest -m soak tests/sglang $(PYTEST_ARGS)

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## the benchmarks under bench/, each printing its own numbers (a fleet of synthetic sidecars: python bench/fleet.py)
	@for file in bench/tick.py bench/emulator_vs_simulator.py bench/arena.py; do \
	  if [ -f "$$file" ]; then echo "== $$file"; $(BIN)/python "$$file" $(ARGS) || exit 1; fi; \
	done

wheel: setup ## build dist/fluidpd-*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove .venv and every build and cache folder
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
