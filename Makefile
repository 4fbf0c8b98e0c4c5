# Two commands: `make demo` trains more rows than RAM, `make test` checks everything. `make help` lists the rest.
# PYTHON chooses the interpreter that .venv is made from; ARGS is passed on, for example
#   make demo ARGS="--memory 1GiB"        make test ARGS="-k adam -x"        make bench ARGS="--threads 1"
# Tests run in WORKERS processes; `make test WORKERS=0` runs them in one that a debugger can stop.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
PACKAGING := pyproject.toml constraints.txt
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
TYPES := $(BIN)/pyright --pythonpath $(BIN)/python
# Types take a processor 40 seconds, so they are checked beside the tests; what is wrong with them is told at the end.
beside_types = $(TYPES) >$(VENV)/types.log 2>&1 & types=$$!; $(1); tests=$$?; \
  wait $$types || { cat $(VENV)/types.log; exit 1; }; exit $$tests
# A file's tests stay together, in the order of the folders: the longest files are not the last ones.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-keras test test-all lint format docs wheel bench gpu gpu-emulated clean style

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo ## train beside nn.Embedding in RAM, then 22 million rows on disk, killed and resumed
	@$(BIN)/python examples/matrix_factorization.py $(ARGS)

demo-keras: $(VENV)/.installed-demo-keras ## train a ranking model with Keras and TensorFlow, on disk
	@$(BIN)/python examples/keras_ranking.py $(ARGS)

test: style ## lint, and all tests but those marked slow or gpu
	@$(call beside_types,$(PYTEST) $(ARGS))

test-all: style ## the same with the slow ones: every rule, size and fault in every combination
	@$(call beside_types,$(PYTEST) -m "not gpu" $(ARGS))

lint: style ## style, the import contract and types
	@$(TYPES)

style: $(VENV)/.installed-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-test ## put the code into shape
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

docs: $(VENV)/.installed-docs ## the pages and the API reference as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo "Open build/site/index.html"

wheel: $(VENV)/.created ## a wheel in dist/, for `pip install` elsewhere
	@$(BIN)/python -m pip wheel --no-deps -qq --disable-pip-version-check -w dist .
	@ls dist/*.whl

bench: $(VENV)/.installed-bench ## one embedding step, against torch and FBGEMM; ARGS="disk" and others: ARGS=--help
	@$(BIN)/python -m benchmarks $(ARGS)

gpu: ## on a machine with a GPU: all that is to be known of it, in ten minutes; PYTHON has torch, numba and pytest
	@$(PYTHON) tests/gpu/on_gpu.py $(ARGS)

gpu-emulated: ## tests/gpu on an emulated GPU, without one; PYTHON has torch for CUDA, numba, pytest and hypothesis
	@$(PYTHON) tests/gpu/emulate.py $(ARGS)

clean: ## remove .venv and everything generated
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per set of extras; pip runs again only after the packaging files changed.
$(VENV)/.installed-demo: EXTRAS := torch
$(VENV)/.installed-demo-keras: EXTRAS := keras
$(VENV)/.installed-test: EXTRAS := torch,gpu,keras,jax,cli,dev,docs
$(VENV)/.installed-docs: EXTRAS := docs
$(VENV)/.installed-bench: EXTRAS := torch,cli,bench
$(VENV)/.installed-%: $(PACKAGING) | $(VENV)/.created
	@echo "Installing embedrock[$(EXTRAS)] into $(VENV) (the first time takes minutes) ..."
	@$(INSTALL) -e ".[$(EXTRAS)]"
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Embedrock needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@
