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
# Those whose results depend on what the CPU computes.
ARITHMETIC_TESTS := $(addprefix tests/worker/,ops models executor training test_exactness.py test_speculation_equality.py)

.PHONY: up test test-avx2 soak check fuzz conformance format clean
.DEFAULT_GOAL := up

KERNELS := $(wildcard worker/ops/cpu/*.cpp worker/ops/cpu/*.h worker/ops/cpu/*.inc)

$(VENV)/ready: pyproject.toml constraints.txt $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pointsman needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time takes a minute or two) …"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' 2>$(VENV)/pip.log || { cat $(VENV)/pip.log >&2; exit 1; }
	@touch $@

up: $(VENV)/ready
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

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
