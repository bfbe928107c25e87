# Three commands: `make up` runs a fleet, `make test` the tests that a change must pass, at a tenth of
# their depth, and `make check` the house rules.
# `make test-all` runs every test at full depth, `make soak` the tests that load a fleet for minutes,
# `make test-avx2` the worker's arithmetic as a CPU without AVX-512 does it, `make fuzz` sends random
# input to each parser of external data, and `make conformance` tests the picker from outside.
# `make test-agents` runs ten turns of each client framework of tests/integration/agents.txt, which it
# installs into .venv-agents.
# `make test-slow` prints the 50 slowest tests of the last run.
# `make generate` writes what follows from other files: manifests, chart, tables of the docs.
# `make docs` builds the site. `make release-dry` makes all that a release consists of, into dist/, and
# publishes nothing; `make renew` renews the digests and locks of images (RELEASING.md).
# Each creates .venv first and reuses it until pyproject.toml, constraints.txt or the kernels change.
PYTHON ?= python3
VENV   := .venv
AGENTS := .venv-agents
BIN    := $(VENV)/bin
ARGS   ?=
JOBS   ?= 2
FUZZ_SECONDS ?= 60
# Where Python must not write .pyc files, each of the hundreds of processes that the tests start compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Those whose results depend on what the CPU computes; Triton's interpreter computes the same on any.
# Graphs and drafters are compared with the same operations without them.
ARITHMETIC_TESTS := $(addprefix tests/worker/,ops models executor test_exactness.py test_speculation_equality.py) \
	$(addprefix --ignore tests/worker/,ops/triton executor/drafting executor/test_graphs.py executor/test_model_runner_out_of_memory.py)

.PHONY: up test test-all test-rest test-agents test-avx2 test-slow test-budget soak check check-types check-rules fuzz conformance format clean \
	docs generate renew release-check release-parts release-dry
.DEFAULT_GOAL := up

KERNELS := $(wildcard worker/ops/cpu/*.cpp worker/ops/cpu/*.h worker/ops/cpu/*.inc scripts/build_kernels.py)

# `make up` installs what it needs: with `--engine sim` nothing of torch. Where developers' tools are, all of it is there.
UP_EXTRA := $(if $(findstring --engine sim,$(subst =, ,$(ARGS))),sim,fleet)
UP_READY := $(if $(wildcard $(VENV)/ready),$(VENV)/ready,$(VENV)/ready-$(UP_EXTRA))

# Simulated workers need no kernels.
$(VENV)/ready $(VENV)/ready-fleet: $(KERNELS)
$(VENV)/ready $(VENV)/ready-sim $(VENV)/ready-fleet: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pointsman needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; it takes about a minute) …"
	@$(BIN)/python scripts/install.py $(or $(patsubst ready-%,%,$(filter ready-%,$(@F))),dev)
	@touch $@

up: $(UP_READY)
	@$(BIN)/pointsman up $(ARGS)

DEFAULT_TESTS := not soak and not full
RECORDS       := .pytest_cache/durations
# With `=`: pytest takes a file that follows an option for one of tests, if it exists.
PYTEST         = $(BIN)/python -m pytest -n $(JOBS) --record-durations=$(RECORDS)/$@.jsonl

test: $(VENV)/ready
	@$(PYTEST) -m "$(DEFAULT_TESTS)" $(ARGS)

test-all test-rest: export DEPTH = full
test-all: $(VENV)/ready
	@$(PYTEST) -m "not soak" $(ARGS)

# What `make test-all` adds to `make test`.
test-rest: $(VENV)/ready
	@$(PYTEST) -m "not soak" --beyond-default $(ARGS)

soak: export DEPTH = full
soak: $(VENV)/ready
	@$(PYTEST) -m soak $(ARGS)

$(AGENTS)/ready: tests/integration/agents.txt
	@test -x $(AGENTS)/bin/python || $(PYTHON) -m venv $(AGENTS)
	@$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'instructor>=1.17'
	@touch $@

test-agents: $(VENV)/ready $(AGENTS)/ready
	@$(PYTEST) tests/integration/test_agent_frameworks.py $(ARGS)

test-slow: $(VENV)/ready
	@$(BIN)/python -m tests.durations slowest $(wildcard $(RECORDS)/*.jsonl)

# Prints the tests of `make test` that are too slow for it; fails on one that is far too slow.
test-budget: $(VENV)/ready
	@$(BIN)/python -m tests.durations check $(RECORDS)/test.jsonl

# Torch, oneDNN, MKL and the kernels of worker/ops/cpu each have a word of their own for it.
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: export DNNL_MAX_CPU_ISA = AVX2
test-avx2: export MKL_ENABLE_INSTRUCTIONS = AVX2
test-avx2: export POINTSMAN_CPU_ISA = avx2
test-avx2: $(VENV)/ready
	@grep -qs avx512f /proc/cpuinfo || { echo "make test ran these: this CPU has no AVX-512"; exit; }; $(PYTEST) -m "$(DEFAULT_TESTS)" $(ARITHMETIC_TESTS) $(ARGS)

fuzz: $(VENV)/ready
	@$(BIN)/python scripts/fuzz.py $(FUZZ_SECONDS)

# Both suites run, whatever the first one finds; the reports go to conformance/reports/.
conformance: $(VENV)/ready
	@status=0; \
	$(BIN)/python -m conformance.epp --report conformance/reports/epp.yaml $(ARGS) || status=$$?; \
	$(BIN)/python -m conformance.k8s --report conformance/reports/k8s.yaml $(ARGS) || status=$$?; \
	exit $$status

# Two, so that `make -j2 check` uses two cores.
check: check-types check-rules

check-types: $(VENV)/ready
	@$(BIN)/mypy

check-rules: $(VENV)/ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_budgets.py
	@$(BIN)/python scripts/check_words.py

format: $(VENV)/ready
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python scripts/wrap_prose.py --write

docs: $(VENV)/ready
	@$(BIN)/mkdocs build --strict --quiet --site-dir site

# TAG: the tag that has to fit, if there is one already.
release-check: $(VENV)/ready
	@$(BIN)/python scripts/release.py check $(TAG)

release-parts release-dry: $(VENV)/ready
	@$(BIN)/python scripts/release.py $(@:release-%=%)

generate: $(VENV)/ready
	@$(BIN)/python scripts/gen_deploy.py
	@for part in chart flags plugins; do $(BIN)/python scripts/document_$$part.py --write; done
	@$(BIN)/python scripts/wrap_prose.py --write

renew: $(VENV)/ready
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/lock_images.py
	@$(BIN)/python scripts/pin_images.py
	@$(MAKE) generate

clean:
	rm -rf $(VENV) $(AGENTS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
