# Baton's commands; `make help` lists them. Every target makes the environment it needs in $(VENV) by itself, and
# finds it up to date in no time when pyproject.toml and constraints.txt have not changed since.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PORT ?= 8000
ARGS ?=

# The first Python that is new enough; plain python3 otherwise, which scripts/environment.py then refuses by name.
is_new = $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
candidates = python3 python3.14 python3.13 python3.12 python3.11
PYTHON ?= $(or $(shell for p in $(candidates); do if $(is_new); then echo $$p; break; fi; done),python3)

# One thread a process and no spinning: tests start several workers on few cores. Nothing is fetched at run time.
# Cluster tests know what the host's kernels answer.
TEST_ENV := BATON_DEVICE=cpu OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
BENCH_ENV := BATON_DEVICE=cpu TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(VENV)/bin/python -m pytest -q
# Tests that start no cluster run in as many processes as there are cores, four at most, each file in one of them; the
# others have the machine to themselves. What ARGS names runs in one process.
BESIDE := -n logical --maxprocesses 4 --dist loadfile
PROTO := proto/services/rpc/v1/baton.proto
# A benchmark is benchmarks/NAME/__main__.py, or benchmarks/NAME.py with a main block.
BENCH_FILES = $(wildcard benchmarks/*/__main__.py) $(shell grep -ls '^if __name__' benchmarks/*.py)
BENCHES = $(patsubst benchmarks/%,%,$(patsubst %.py,%,$(subst /__main__.py,.py,$(BENCH_FILES))))

.PHONY: help serve test test-fast test-system lint fmt bench gpu-check proto

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(VENV)/.run ## install what it needs and start a local cluster on the demo model (PORT=8000, ARGS=...)
	@exec $(VENV)/bin/baton up --port $(PORT) $(ARGS)

test: $(VENV)/.dev ## all tests that need nothing but this checkout (ARGS=... goes to pytest)
ifeq ($(ARGS),)
	@status=0; \
	$(PYTEST) $(BESIDE) -m "not e2e and not system" || status=$$?; \
	$(PYTEST) -m "e2e and not system" || status=$$?; \
	exit $$status
else
	@$(PYTEST) -m "not system" $(ARGS)
endif

test-fast: $(VENV)/.dev ## the tests that start no cluster
	@$(PYTEST) -m "not e2e and not system" $(or $(ARGS),$(BESIDE))

test-system: $(VENV)/.dev ## the tests that need Debian packages or heavy clients
	@$(PYTEST) -m system $(ARGS) || { status=$$?; [ $$status -eq 5 ] || exit $$status; }

lint: $(VENV)/.dev ## ruff, mypy and the import walls, as CI runs them
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

fmt: $(VENV)/.dev ## format the code and fix what ruff can fix
	@$(VENV)/bin/ruff check --fix-only .
	@$(VENV)/bin/ruff format .

bench: $(addprefix bench-,$(BENCHES)) ## all benchmarks, one after the other

bench-%: $(VENV)/.dev ## one benchmark; bench-NAME writes benchmarks/results/NAME.json
	@$(BENCH_ENV) $(VENV)/bin/python -m benchmarks.$* $(ARGS)

gpu-check: $(VENV)/.dev ## kernels for GPUs: right and how fast, on this machine's card if it has one
	@HF_HUB_OFFLINE=1 $(VENV)/bin/python -m benchmarks.gpu

proto: $(VENV)/.dev ## regenerate the gRPC stubs from proto/
	@$(VENV)/bin/python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. --pyi_out=. $(PROTO)

# The stamps of the two environments; the larger one contains the smaller. Installing builds the host kernels.
INSTALLED_FROM := pyproject.toml constraints.txt setup.py kernels/cpu/building.py scripts/environment.py $(wildcard kernels/cpu/native/*)

$(VENV)/.run: $(INSTALLED_FROM)
	@command -v $(PYTHON) >/dev/null || { echo "Baton needs Python 3.11 or newer: install python3."; exit 1; }
	@exec $(PYTHON) scripts/environment.py run $(VENV)

$(VENV)/.dev: $(INSTALLED_FROM)
	@command -v $(PYTHON) >/dev/null || { echo "Baton needs Python 3.11 or newer: install python3."; exit 1; }
	@exec $(PYTHON) scripts/environment.py dev $(VENV)
