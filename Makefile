# Everything a fresh machine needs is Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test lint bench clean

quickstart: $(READY)
	$(BIN)/meshpar quickstart

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy -p meshpar

bench: $(READY)
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/import_time.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,transformers,test,lint]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info
