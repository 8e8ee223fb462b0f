# quickstart: train a small model on this machine. test, check: what must pass before a commit.
#
# PYTHON      interpreter the environment is made with (3.11 to 3.13)
# TORCH_ARGS  extra arguments for pip when it installs torch, e.g. an --index-url with another build
# EXTRAS      optional dependencies installed with the package (docs/dependencies.md)
# ARGS        overrides and options for `lockstep train`, or arguments for pytest

PYTHON ?= python3
TORCH_ARGS ?=
EXTRAS ?= dev,gguf
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart test check format docs clean

quickstart: $(STAMP)
	$(BIN)/lockstep train configs/quickstart.yaml $(ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --maxprocesses 8 $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/lockstep config reference --out docs/configuration.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that TORCH_ARGS (a CPU build, another CUDA version) concerns nothing else.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH_ARGS) -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@
