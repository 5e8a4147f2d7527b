# rlpost: set-up, demo, tests. `make` alone lists the targets.
# Everything runs in .venv, which each target makes on first use (some 4 minutes, 3 GB); a changed lock or pyproject.toml mends it.

VENV  := .venv
STAMP := $(VENV)/.made
RUN   := $(VENV)/bin/python

# The lock is made and tried with Python 3.11. `make PYTHON=python3.12 .venv` uses another one, from 3.11 on.
FIND_PYTHON = for name in python3.11 python3 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$name && break; done
PYTHON ?= $(shell $(FIND_PYTHON))

# Where tests are and what is checked by the type checker: pyproject.toml. ARGS goes to the command: make demo ARGS="seed=1".
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest
ARGS   ?=
NO_TESTS_COLLECTED := 5

.DEFAULT_GOAL := help
.PHONY: help .venv demo test test-unit test-slow lint bench clean
MAKEFLAGS += --no-print-directory

help:
	@echo 'make demo       train the embedded default: GRPO on a tiny model, real Ray and vLLM on two CPU cores'
	@echo 'make test       lint, then all tests but the slow ones'
	@echo 'make test-unit  the pure tests (seconds)'
	@echo 'make test-slow  the tests that take minutes: whole training runs'
	@echo 'make lint       ruff and mypy'
	@echo 'make bench      the benchmarks of docs/benchmarks.md'
	@echo 'make .venv      the environment only (every target makes it on first use)'
	@echo 'make clean      remove caches and build outputs; runs/ and .venv stay'
	@echo 'ARGS="..." goes to the command, for example: make demo ARGS="seed=1", make test-unit ARGS="-k packing"'

.venv: $(STAMP)

$(STAMP): requirements/cpu.lock requirements/make_venv.py pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo 'make: no Python 3.11 found. Install it, or name one: make PYTHON=/path/to/python3.11 .venv' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'make: PYTHON=$(PYTHON) is not Python 3.11 or newer. Name one: make PYTHON=/path/to/python3.11 .venv' >&2; exit 1; }
	@$(PYTHON) requirements/make_venv.py $(VENV) --lock requirements/cpu.lock

demo: $(STAMP)
	$(RUN) -m rlpost.train config=grpo_tiny $(ARGS)
	@echo "where the time went: $(RUN) -m rlpost.report $$(ls -td runs/*/ | head -n 1)"

test: lint
	$(PYTEST) -m 'not slow' $(ARGS)

test-unit: $(STAMP)
	$(PYTEST) tests/unit -m 'not slow' $(ARGS)

# That no test is marked slow is no failure; every other exit code is.
test-slow: $(STAMP)
	@$(PYTEST) -m slow $(ARGS) || { code=$$?; test $$code -eq $(NO_TESTS_COLLECTED) && echo 'no test is marked slow' || exit $$code; }

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

bench: $(STAMP)
	$(RUN) -m benchmarks.step $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find rlpost tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
