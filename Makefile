# Everything a fresh machine needs is Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test lint bench clean lab

quickstart: $(READY)
	$(BIN)/meshpar quickstart

# A file of tests at a time on each of two workers: half of what they do is waiting for processes of their own.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# A real SLURM and network namespaces for the tests that want them: Debian's packages, where they may be installed.
lab:
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq; \
	  apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2 > /dev/null; \
	else \
	  echo "no root or no apt-get: the tests on a real SLURM will be skipped"; \
	fi

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
