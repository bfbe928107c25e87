# Three commands: `make up` runs a fleet, `make test` the tests, `make check` the house rules. And
# `make fuzz` throws nonsense at everything that reads what others send, a minute for each, and
# `make conformance` asks the picker, from outside, what the protocol asks of it.
# Each makes its own .venv first and re-uses it while pyproject.toml and constraints.txt stay the same.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
JOBS   ?= 2
FUZZ_SECONDS ?= 60

.PHONY: up test check fuzz conformance format clean
.DEFAULT_GOAL := up

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pointsman needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time takes a minute or two) …"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' 2>$(VENV)/pip.log || { cat $(VENV)/pip.log >&2; exit 1; }
	@touch $@

up: $(VENV)/ready
	@$(BIN)/pointsman up $(ARGS)

test: $(VENV)/ready
	@$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

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
