# Everything on a fresh machine, environment included: `make demo`, `make test`. Settings: PYTHON, VENV, TEST_WORKERS.
VENV ?= .venv
export VENV
BIN := $(VENV)/bin
# Two workers, each with as many XLA threads as one process alone has: the CPU thread count is part of the contract, and
# workers change neither the affinity nor NPROC. A file's tests stay together, so that they compile once.
TEST_WORKERS ?= 2
# Demo and tests compute on the CPU, also where there is a GPU.
CPU := JAX_PLATFORMS=cpu

.PHONY: help env demo test lint lock clean

help:
	@echo "make demo    train a tiny model by GRPO on this CPU, compare with native numerics, plot both (under 5 minutes)"
	@echo "make test    all tests that need no GPU (under 20 minutes on 2 cores)"
	@echo "make env     only the environment, in $(VENV)"
	@echo "make lint    unused names, import order and the like, by ruff"
	@echo "make lock    resolve the dependencies anew and rewrite constraints.txt"
	@echo "make clean   remove the environment, caches and build folders"

env:
	@sh scripts/bootstrap.sh

demo: env
	$(BIN)/python scripts/demo.py

test: env
	$(CPU) $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile -m "not gpu" --ignore-glob '*/pallas_kernels/test_hopper_*'
	$(CPU) $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile tests/pallas_kernels/test_hopper_*.py

lint: env
	$(BIN)/ruff check .

lock: env
	sh scripts/lock.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
