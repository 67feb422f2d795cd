# Everything a fresh machine needs is Python 3.11 or newer and make.
PYTHON ?= python3
# A version, as in `make test TORCH=2.11.0`, or newest: the target runs in an environment of its own with that torch, not with the pinned one.
TORCH ?=
VENV ?= .venv$(TORCH:%=-torch-%)
# Ranks and workers that find compiled modules start sooner.
export PYTHONDONTWRITEBYTECODE :=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
QUICKSTART := $(VENV)/.quickstart
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

# A file of tests at a time on each of three workers: half of what they do is waiting for processes of their own.
PYTEST := -m pytest -n 3 --dist loadfile --no-loadscope-reorder

BY_DAY := 'not long and not nightly'

.PHONY: quickstart test test-jobs test-all coverage lint format docs bench clean lab

quickstart: $(QUICKSTART)
	$(BIN)/meshpar quickstart

# By folder: every pass, checkpoint and command on a few ranks; whole jobs, stores and schedulers. Both leave out further cases of a claim (nightly). Then all.
test: $(READY)
	$(BIN)/python $(PYTEST) -m $(BY_DAY) --ignore=tests/jobs --ignore=tests/nightly

test-jobs: $(READY)
	$(BIN)/python $(PYTEST) -m $(BY_DAY) tests/jobs

test-all: $(READY)
	$(BIN)/python $(PYTEST)

# Ranks and commands are processes of their own: each writes its own data file, and `combine` joins them.
coverage: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) || failed=$$?; \
	$(BIN)/coverage combine --quiet && $(BIN)/coverage html --quiet && $(BIN)/coverage report; \
	exit $${failed:-0}

# Azurite from npm, a real SLURM and network namespaces from Debian's packages, for the tests that want them, where they may be installed.
lab:
	npm install --prefix $(VENV)/azurite --no-audit --no-fund --no-save --omit=dev --loglevel=error azurite@3.35.0 \
	  || echo "no npm or no network: the tests on Azure Blob Storage will be skipped"
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq; \
	  apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2 > /dev/null; \
	else \
	  echo "no root or no apt-get: the tests on a real SLURM will be skipped"; \
	fi

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	.ci/types $(BIN)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Into site/. A broken link, a page in no menu or an undocumented public name ends it.
docs: $(READY)
	$(BIN)/python -m pytest tests/core/test_docs.py
	$(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/import_time.py

$(QUICKSTART): EXTRAS := train,transformers
$(READY): EXTRAS := train,transformers,test,lint,docs
$(QUICKSTART) $(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
ifneq ($(TORCH),)
	sed '/^torch==/d' constraints.txt > $(PINS)
	echo 'torch$(if $(filter-out newest,$(TORCH)),==$(TORCH))' >> $(PINS)
endif
	$(BIN)/python -m pip install -qq --constraint $(PINS) torch
	$(BIN)/python -m pip install -qq --constraint $(PINS) --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
