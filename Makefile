# `make demo` and `make test` set up all that they need on a fresh machine: a virtual environment in .venv, installed
# again when pyproject.toml or constraints.txt changes. Python 3.11 to 3.13; another one than python3: PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
DEFAULT := not gpu and not slow and not bench
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test slow lint bench figures

demo: .venv/.installed
	$(BIN)/graphpilot demo --out runs/demo

# Most tests wait more than they compute, so two files run side by side; those that time something run alone.
# The seed gives both the same order of sets.
test: lint
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 2 --dist loadfile -m "$(DEFAULT) and not alone"
	$(BIN)/python -m pytest -m "$(DEFAULT) and alone"

slow: .venv/.installed-dev
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: .venv/.installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

bench: .venv/.installed-dev
	$(BIN)/python -m tests.bench.prediction --device cpu

figures: .venv/.installed-dev
	$(BIN)/python -m tests.bench.figures

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing graphpilot into .venv"
	@$(PIP) --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing graphpilot and what its tests need into .venv"
	@$(PIP) --editable '.[dev]'
	@touch .venv/.installed $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else f"graphpilot needs Python 3.11 to 3.13, and $(PYTHON) is {sys.version.split()[0]}; set PYTHON=python3.12 or so")'
	@$(PYTHON) -m venv .venv
