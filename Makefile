# Thin front of the project's commands. `make` lists them.
#
# By default everything is set up in .venv, once. Where torch is already installed and nothing may be
# installed (a machine without a network, a container), run in the present interpreter instead:
#     make bench PYTHON_ENV=system
# Name an interpreter with PYTHON, for example: make test PYTHON=python3.12

PYTHON_ENV ?= venv
UNTIL ?= rounds

FITS := -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))'

ifndef PYTHON
PYTHON := $(shell for candidate in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$candidate $(FITS) 2>/dev/null && echo $$candidate && break; done)
endif

ifeq ($(PYTHON_ENV),venv)
RUN := .venv/bin/python
READY := .venv/.ready
else ifeq ($(PYTHON_ENV),system)
RUN := $(PYTHON)
READY := interpreter
else
$(error PYTHON_ENV is "$(PYTHON_ENV)"; it may be "venv" (the default: an environment of its own in .venv) or "system" (the present interpreter, nothing is installed))
endif

PIP_INSTALL := .venv/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt

# Test files on all cores, where pytest-xdist is installed; what is shared within a file is made once.
IN_PARALLEL = $$($(RUN) -c 'import importlib.util as util; print("-n auto --dist loadfile" if util.find_spec("xdist") else "")')

.DEFAULT_GOAL := help
.PHONY: bench bench-sweep bench-full bench-zoo test test-full test-libraries lint report clean help interpreter

bench: $(READY) ## Measure the last commits, compare, and write the report (minutes)
	$(RUN) -m harness.run --until $(UNTIL) --report report.html

bench-sweep: $(READY) ## Measure HEAD at all batch sizes of the small models
	$(RUN) -m harness.run --profile sweep --until $(UNTIL) --report report.html

bench-full: $(READY) ## The same with every model, variant and batch size (much longer)
	$(RUN) -m harness.run --profile full --until $(UNTIL) --report report.html

bench-zoo: $(READY) ## Measure HEAD on models of many kinds, or on some: MODELS=dlrm,clip (hours for all on a GPU)
	$(RUN) -m harness.run --profile zoo $(if $(MODELS),--model $(MODELS)) --until $(UNTIL) --report report.html

test: $(READY) ## Run the tests: no GPU and no network needed
	$(RUN) -m pytest $(IN_PARALLEL)

test-full: $(READY) ## Run the tests with the slow ones and the long property-based runs
	$(RUN) -m pytest $(IN_PARALLEL) -m "not benchmark" --hypothesis-profile=full

test-libraries: interpreter ## Run the tests of other people's libraries, in their newest releases (downloads them)
	PYTHON=$(PYTHON) .ci/libraries

lint: $(READY) ## Check style, types, and which module imports which
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m tests.layers

report: $(READY) ## Write report.html from the results measured so far
	$(RUN) -m harness.compare --html report.html

clean: ## Remove what builds, tests and benchmarks leave behind (keeps results/ and .venv)
	rm -rf build dist .venv-libraries .asv .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache report.html *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON_ENV=system  use the present interpreter and install nothing (default: .venv)"
	@echo "  UNTIL=conclusive   measure more rounds, up to a bound, where a verdict is inconclusive (default: rounds)"
	@echo "  MODELS=a,b,c       of the zoo measure these models alone (default: all)"
	@echo "  PYTHON=...         the interpreter to use (default: $(or $(PYTHON),none found))"

interpreter:
	@$(or $(PYTHON),false) $(FITS) || { echo "$(or $(PYTHON),python3) is not a Python 3.10 to 3.13." \
		"Install one, or name it: make test PYTHON=/path/to/python" >&2; exit 1; }

# One pip command under the constraints, so that no dependency can bring another torch. setuptools comes first
# because the checkout is built without an isolated environment, whose packages would be unpinned.
.venv/.ready: pyproject.toml constraints.txt | interpreter
	@echo "Setting up .venv with $$($(PYTHON) --version): once, several minutes where torch must be downloaded."
	.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev,nlp,integrations]'
	@touch $@
