# Three commands: `make up` runs a fleet, `make test` the tests, `make check` the house rules. And
# `make test-avx2` runs the worker's arithmetic as a CPU without AVX-512 does it,
# `make soak` runs the tests that take longer than 20 seconds each, which `make test` leaves out,
# `make fuzz` throws nonsense at everything that reads what others send, a minute for each, and
# `make conformance` asks the picker, from outside, what the protocol asks of it.
# Each makes its own .venv first and re-uses it while pyproject.toml, constraints.txt and the kernels stay the same.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
JOBS   ?= 2
FUZZ_SECONDS ?= 60
# Those whose results depend on what the CPU computes; Triton's interpreter computes the same on any.
ARITHMETIC_TESTS := $(addprefix tests/worker/,ops models executor training test_exactness.py test_speculation_equality.py) \
	--ignore tests/worker/ops/triton

.PHONY: up test test-avx2 soak check fuzz conformance format clean
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

test: $(VENV)/ready
	@$(BIN)/python -m pytest -n $(JOBS) -m "not soak" $(ARGS)

soak: $(VENV)/ready
	@$(BIN)/python -m pytest -n $(JOBS) -m soak $(ARGS)

# Torch, oneDNN, MKL and the kernels of worker/ops/cpu each have a word of their own for it.
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: export DNNL_MAX_CPU_ISA = AVX2
test-avx2: export MKL_ENABLE_INSTRUCTIONS = AVX2
test-avx2: export POINTSMAN_CPU_ISA = avx2
test-avx2: $(VENV)/ready
	@$(BIN)/python -m pytest -n $(JOBS) $(ARITHMETIC_TESTS) $(ARGS)

fuzz: $(VENV)/ready
	@$(BIN)/python scripts/fuzz.py $(FUZZ_SECONDS)

# Both suites run, whatever the first one finds; the reports go to conformance/reports/.
conformance: $(VENV)/ready
	@status=0; \
	$(BIN)/python -m conformance.epp --report conformance/reports/epp.yaml $(ARGS) || status=$$?; \
	$(BIN)/python -m conformance.k8s --report conformance/reports/k8s.yaml $(ARGS) || status=$$?; \
	exit $$status

check: $(VENV)/ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_budgets.py

format: $(VENV)/ready
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python scripts/wrap_prose.py --write

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
