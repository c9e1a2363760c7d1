# demo: the main job. test: what a newcomer runs. test-all: every real part. All of them make and fill .venv first.
PYTHON ?= python3
VENV := .venv
PEERS := .venvs/peers
BIN := $(VENV)/bin
GYRE := $(BIN)/gyre
# pip compiles one module after the other, most of which nobody imports: a minute. The first import compiles what it needs.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Test files that run side by side, each worker with one thread of arithmetic. Three for two cores: a third of the time a
# test waits for processes and timers.
WORKERS ?= 3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Hundreds of processes import the package: its bytecode is kept, even where the user's shell says otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo install install-dev test test-all test-failed test-variants peers vllm environments types-and-tests-read test-every docs check style types mutants gpu-test bench bench-gpu bench-gpus clean

demo: install
	$(GYRE) train configs/arith_grpo_cpu.toml --check-goal

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev,data,track,cluster,pod,moments,trace]'
	touch $@

# TRL, verl and lm-eval in an environment of their own, for the tests that compare with them.
peers: $(PEERS)/.installed

$(PEERS)/.installed: tests/peers/environment.py $(VENV)/.installed-dev
	$(BIN)/python tests/peers/environment.py $(PEERS)
	touch $@

# vLLM's CPU build in an environment of its own, for the tests of the sidecar; about a minute.
vllm: .venvs/vllm/gyre-sidecar.json

.venvs/vllm/gyre-sidecar.json: $(VENV)/.installed-dev
	$(GYRE) sidecar install vllm --folder .venvs/vllm

check: style types

style: install-dev
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/lint-imports

types: install-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# The GPU's tests are not even imported.
test: style
	$(PYTEST) --ignore tests/gpu -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not variant and not gpu"

# While the environments of the peers and of vLLM are filled, one core checks types and reads the tests. Workers that
# began with tests that were never read would each compile all of them.
# Without the package index the tests that need the peers fail, and those of vLLM are skipped, each with the reason; the
# others still run.
test-all: style
	$(MAKE) --jobs 2 environments types-and-tests-read
	$(MAKE) test-every

environments: install-dev
	-$(MAKE) peers
	-$(MAKE) vllm

types-and-tests-read: types
	mkdir -p build
	$(PYTEST) --collect-only --quiet --quiet > build/collected.txt || { cat build/collected.txt; exit 1; }

test-every: install-dev
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not variant and not gpu"

# Further settings of what test-all shows: other killed workers, dtypes, layouts, objectives. Not part of CI.
test-variants: install-dev
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "variant and not gpu"

# What failed in the last run, with nothing beside it; style and types again, since only tests may fail by chance.
test-failed: check
	$(PYTEST) -m "not variant and not gpu" --last-failed --last-failed-no-failures none -rA

# The reference pages, made from the code; a test says when they are out of date.
docs: install-dev
	$(BIN)/python tests/support/reference_pages.py

# Changes the pure modules' operators and constants and asks whether a test notices: hours; goes on where it was stopped.
# MODULES="engine/kv_cache/page_allocator.py" takes some; AGAIN=--again asks once more about what survived. docs/lab-notes/mutants.md.
mutants: install-dev .venvs/mutants/.installed
	nice $(BIN)/python tests/mutants/run.py $(AGAIN) $(MODULES)

.venvs/mutants/.installed:
	$(PYTHON) -m venv .venvs/mutants
	.venvs/mutants/bin/python -m pip install --quiet --disable-pip-version-check 'cosmic-ray>=8.4,<9'
	touch $@

# PART=2/3 runs the second of three parts; ORDER=7 shuffles by that seed; RECORD=--record-seconds measures the parts anew.
gpu-test:
	python3 -m pytest -m gpu tests/gpu $(if $(PART),--part $(PART)) $(if $(ORDER),--order $(ORDER)) $(RECORD)

# Their results land in bench/records; RECORD= only prints them.
bench-gpu bench-gpus: RECORD ?= --record

bench-gpu:
	cd bench && PYTHONPATH=../src python3 attention_gpu.py $(RECORD)
	cd bench && PYTHONPATH=../src python3 engine.py --shape 0.6b $(RECORD)
	cd bench && PYTHONPATH=../src python3 engine.py --shape 8b $(RECORD)
	cd bench && PYTHONPATH=../src python3 engine.py --shape 8b --page-tokens 128 $(RECORD)
	cd bench && PYTHONPATH=../src python3 engine.py --shape 8b --streams 1 8 32 128 256 $(RECORD)
	cd bench && PYTHONPATH=../src python3 engine.py --shape 8b --batch-invariant $(RECORD)
	cd bench && PYTHONPATH=../src python3 engine.py --shape 8b --prefix-hits $(RECORD)
	cd bench && PYTHONPATH=../src python3 invariant_train.py $(RECORD)
	cd bench && PYTHONPATH=../src python3 train.py $(RECORD)
	cd bench && PYTHONPATH=../src python3 plan_check.py $(RECORD)
	cd bench && PYTHONPATH=../src python3 ring.py $(RECORD)
	cd bench && PYTHONPATH=../src python3 rl_step_gpu.py $(RECORD)
	cd bench && PYTHONPATH=../src python3 rl_step_gpu.py --shape 8b --steps 3 --warm-up 1 $(RECORD)

# On a host with several GPUs.
bench-gpus:
	cd bench && PYTHONPATH=../src python3 train_ranks.py --rows 8b:none:same:8192:zero=2 8b:none:fp8:8192:zero=2 4b:selective:same:65536:grpo $(RECORD)
	cd bench && PYTHONPATH=../src python3 handover.py $(RECORD)
	cd bench && PYTHONPATH=../src python3 pod_handover.py $(RECORD)
	cd bench && PYTHONPATH=../src python3 pod_handover.py --through cuda-ipc $(RECORD)
	cd bench && PYTHONPATH=../src python3 weights_tensor.py --shape 8b $(RECORD)
	cd bench && PYTHONPATH=../src python3 weights_tensor.py --shape 32b --wall-s 540 $(RECORD)
	cd bench && PYTHONPATH=../src python3 snapshot.py --to build/snapshots $(RECORD)
	cd bench && PYTHONPATH=../src python3 ring.py --config ../configs/grpo_8b_ray.toml $(RECORD)
	cd bench && PYTHONPATH=../src python3 async_ring.py --completions 512 --leg-s 900 $(RECORD)

bench: install
	$(BIN)/python bench/sandbox.py
	$(BIN)/python bench/engine_cpu.py
	$(BIN)/python bench/grpo_step.py
	$(BIN)/python bench/serve.py --mode all --peer-python .venvs/bench_vllm/bin/python --gateway-peer-python .venvs/bench_litellm/bin/python

clean:
	rm -rf $(VENV) $(PEERS) .venvs/vllm runs
