# `make demo` and `make test` set up what they need; everything else is one command too.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kairox-installed
OUT ?= out

.PHONY: setup demo test check bench validate gpu-check clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[exec,group,notebook,dev]"
	touch $(STAMP)

# Record, calibrate, sweep, draw, run the best live and compare: on the shipped model, without a GPU.
demo: $(STAMP)
	$(BIN)/python -m experiments.demo --out $(OUT)/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Speed, as ratios to a named reference in the same run. Needs a quiet machine.
bench: $(STAMP)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python benchmarks/bench_simulation.py
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python benchmarks/bench_kernels.py
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python benchmarks/bench_recorder.py
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python benchmarks/bench_host_pool.py

# Gate G3: live against simulated on the emulated machine. Needs a quiet machine, several minutes.
validate: $(STAMP)
	$(BIN)/python -m experiments.validate --out $(OUT)/validate

# What only a CUDA card can show, in under nine minutes. Runs with $(PYTHON) as it is, since such
# machines are often bare and offline: torch, triton, transformers and numba are enough. cuBLAS gives
# the same bits beside other streams only with a workspace of its own (its documentation, 2.1.4).
gpu-check:
	CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONPATH=. $(PYTHON) -m experiments.gpu_check --out $(OUT)/gpu-check

clean:
	rm -rf $(OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
