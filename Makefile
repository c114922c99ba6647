# Everything runs from .venv, which the first target makes, and test-oldest from .venv-oldest. Needed beforehand: Python
# 3.11 or later, and make.
#
#   make demo                   train the first example
#   make test WORKERS=8         all checks, eight test processes
#   make test TESTS=tests/x.py  all checks, some of the tests
#   make PYTHON=python3.12 …    another interpreter (after make clean)

PYTHON  ?= python3
WORKERS ?= 2
TESTS   ?=

# Where everything is installed, in which versions; test-oldest sets both.
PLACE    := .venv
VERSIONS := constraints.txt

BIN  := $(PLACE)/bin
# The constraints are given on the command line, not as PIP_CONSTRAINT: that one would reach into isolated builds too.
PIP  := $(BIN)/python -m pip --disable-pip-version-check install -c $(VERSIONS)
# One thread for each worker: the workers are the parallelism. Bytecode is kept even where the caller turns that off: the
# tests start many processes, each of which would compile the package again.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --timeout=600

VENV  := $(PLACE)/.made
DEMO  := $(PLACE)/.installed-demo
DEV   := $(PLACE)/.installed-dev
BENCH := $(PLACE)/.installed-bench
DOCS  := $(PLACE)/.installed-docs
SUITE := $(PLACE)/.installed-test

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-deep test-oldest tests lint format types contracts structure bench docs docs-serve clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s  %s\n", $$1, $$2 }' Makefile

demo: $(DEMO) ## train the digits example
	$(BIN)/python examples/03_digits_cnn.py

test: lint types contracts structure ## every check CI makes: lint, types, contracts, structure, then the tests
	$(TEST) $(TESTS)

test-deep: $(DEV) ## the slow checks, which test leaves out
	$(TEST) -m deep $(TESTS)

test-oldest: ## the tests with the oldest PyTorch and other libraries that the package accepts; not part of test
	$(MAKE) tests PLACE=.venv-oldest VERSIONS=constraints-oldest.txt

tests: $(SUITE)
	$(TEST) $(TESTS)

lint: $(DEV) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV) ## mypy
	$(BIN)/mypy

contracts: $(DEV) ## import-linter: who may import whom
	$(BIN)/lint-imports

structure: $(DEV) ## circles, private reaches and the like, against their limits
	$(BIN)/python tools/structure.py

bench: $(BENCH) ## speed and memory, side by side with other libraries; pictures in build/bench
	mkdir -p build/bench
	$(BIN)/python -m benchmarks.step --json build/bench/step.json
	$(BIN)/python -m benchmarks.first_step --json build/bench/first_step.json
	$(BIN)/python -m benchmarks.memory --json build/bench/memory.json
	$(BIN)/python -m benchmarks.scaling --json build/bench/scaling.json
	$(BIN)/python -m benchmarks.plot build/bench/*.json

# The variable leaves out a notice of the theme about its own future.
docs: $(DOCS) ## the documentation as a site in site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(DOCS) ## the same at http://127.0.0.1:8000, built again when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict --dev-addr 127.0.0.1:8000

clean: ## remove both environments, caches and build results
	rm -rf .venv .venv-oldest .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched only after its step succeeded; changed versions install again.

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "stepgraph needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	    echo "Fix: name another interpreter, for example: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(PLACE)
	@touch $@

$(DEMO) $(DEV) $(BENCH) $(DOCS) $(SUITE): $(PLACE)/.installed-%: $(VENV) pyproject.toml $(VERSIONS)
	$(PIP) --editable '.[$*]'
	@touch $@
