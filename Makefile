# make         these lines
# make demo    the whole chain on the embedded task: table, picture, report (minutes on a laptop)
# make setup   installs into .venv, and nothing else
# make check   lint, types, and what tests take a minute: after every change
# make test    lint, types, every test
# make tolerances   every test with each set of CPU instructions: comparisons near their tolerance
# make mutants MODULES="losses noise"   how many small changes of modules or rooms are noticed
# make test-vllm   sampling through a vLLM server, on a CPU (an environment of its own: 4 GB)
# make test-slurm   jobs on a real Slurm of this machine: 5 minutes, as root, Debian's slurm-wlm
# make bench   speed and memory of every stage against TRL, in turns (tiny: minutes)
# make bench-sampler   our sampler against vLLM's engine for CPUs, in turns
# make quality   the demo's chain by TRL and by the scripts: minutes, and how good (2 GB; 1 hour)
# make conformance   every objective against TRL, verl, OpenRLHF and torchrl, on golden cases (2 GB)
# make models   which models are right: every decoder of transformers; MODELS="qwen3 opt" some
# make replicate RECIPE=tldr-gpt2   a recipe for several seeds, beside what others have published
# make sweep   what each detail of the papers matters on the embedded task, over seeds
# make sweep SWEEP=assets/recipes/iterative/demo.yaml   iterative DPO beside GRPO, over seeds
# make overoptimization   gold against proxy reward over the distance from SFT
# make results   every recorded figure, on one commit; PARTS="demo film" some: parts, or whole studies
# make clean   removes .venv and output
#
# PYTHON=python3.12 picks the interpreter of .venv, NPROC=4 the number of processes, SEED=1 the seed,
# THREADS=2 threads of each on a CPU, FLAGS="--seeds 0 1 --parallel 2" further flags of replicate,
# sweep or overoptimization, FLAGS="--seeds 0" of quality, BENCH_MODEL=gpt2-small the model of
# `make bench`, and BENCH_FLAGS="--stages sft dpo" its flags.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := assets/requirements.lock
# The GPUs that may be used, as a power of two up to 8 (which divides the batches), else two CPU
# processes.
GPUS := $(shell all=$$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU'); \
	if [ $$all -gt 0 ] && [ -n "$${CUDA_VISIBLE_DEVICES+set}" ]; \
	then echo "$$CUDA_VISIBLE_DEVICES" | tr , '\n' | grep -c '^[^-]'; else echo $$all; fi)
NPROC ?= $(shell for n in 8 4 2 1; do [ $(GPUS) -ge $$n ] && echo $$n && exit; done; echo 2)
SEED ?= 0
THREADS ?= 1
RECIPE ?= demo
SWEEP ?= assets/recipes/ablations/demo.yaml
FLAGS ?=
MODELS ?=
PARTS ?=
# TRL is in an environment of its own: the project does not need it.
BENCH_VENV := .venv-bench
CONFORMANCE_VENV := .venv-conformance
VLLM_VENV := .venv-vllm
BENCH_MODEL ?= tiny
BENCH_FLAGS ?=
DEMO := assets/recipes/demo
# One thread per process on a CPU: the processes are the parallelism. A signal to make reaches what
# it runs only by exec: else it ends the shell around that, which goes on.
RUN = exec env OMP_NUM_THREADS=$(THREADS)
LAUNCH := $(RUN) $(BIN)/torchrun --standalone --nproc_per_node $(NPROC)

STYLE = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
PYTEST = $(RUN) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
.PHONY: help check demo overoptimization replicate results sweep test tolerances mutants models test-vllm test-slurm bench bench-sampler quality conformance setup clean

help:  # the first target: what `make` alone does
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

demo: setup
	$(LAUNCH) train_sft.py --config $(DEMO)/sft.yaml --seed $(SEED)
	$(LAUNCH) train_reward.py --config $(DEMO)/reward.yaml --seed $(SEED)
	$(LAUNCH) train_dpo.py --config $(DEMO)/dpo.yaml --seed $(SEED)
	$(LAUNCH) train_grpo.py --config $(DEMO)/grpo.yaml --seed $(SEED)
	$(LAUNCH) evaluate.py --config $(DEMO)/evaluate.yaml --seed $(SEED)

overoptimization: setup
	$(RUN) $(BIN)/python -m experiments.runs.overoptimization \
		--config assets/recipes/overoptimization/demo.yaml $(FLAGS)

check: setup
	$(STYLE)
	$(PYTEST) --quick

test: setup
	$(STYLE)
	$(PYTEST)

tolerances: setup
	$(RUN) $(BIN)/python -m tests.tolerances --numprocesses 2 --dist loadfile --no-loadscope-reorder

mutants: setup
	$(RUN) $(BIN)/python -m tests.mutants $(MODULES) $(FLAGS)

models: setup
	$(RUN) $(BIN)/python -m assets.recipes.models $(MODELS) $(FLAGS)

test-vllm: $(VLLM_VENV)/.installed
	$(RUN) $(VLLM_VENV)/bin/python -m pytest tests/sampling/test_vllm.py

test-slurm: setup
	$(RUN) $(BIN)/python -m pytest -m slurm -rs

replicate: setup
	$(RUN) $(BIN)/python -m experiments.runs.replicate \
		--recipe $(RECIPE) --num_processes $(NPROC) $(FLAGS)

sweep: setup
	$(RUN) $(BIN)/python -m experiments.runs.sweep --config $(SWEEP) $(FLAGS)

results: setup $(if $(filter conformance,$(or $(PARTS),conformance)),$(CONFORMANCE_VENV)/.installed) \
		$(if $(filter bench-sampler,$(PARTS)),$(VLLM_VENV)/.installed) \
		$(if $(filter bench-quality,$(PARTS)),$(BENCH_VENV)/.installed)
	exec $(BIN)/python -m experiments.evidence.make $(PARTS)

bench: $(BENCH_VENV)/.installed
	$(RUN) $(BENCH_VENV)/bin/python -m experiments.evidence.bench --model $(BENCH_MODEL) $(BENCH_FLAGS)

bench-sampler: $(VLLM_VENV)/.installed
	$(RUN) $(VLLM_VENV)/bin/python -m experiments.evidence.bench.sampler $(FLAGS)

quality: $(BENCH_VENV)/.installed
	$(RUN) $(BENCH_VENV)/bin/python -m assets.recipes.bench.quality $(FLAGS)

conformance: $(CONFORMANCE_VENV)/.installed
	$(RUN) $(CONFORMANCE_VENV)/bin/python -m assets.recipes.conformance

setup: $(VENV)/.installed

# Redone only when a requirements file changes. The lock's hashes are left out: they are those of
# PyPI's wheels, and torch may come from another index, as its builds for CPUs do.
define install
	$(PYTHON) -m venv $(1)
	grep -v -e --hash $(LOCK) | tr -d '\\' > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check -r $(2) -c $(1)/constraints.txt
endef

$(VENV)/.installed: requirements.txt $(LOCK) tests/requirements.txt
	$(call install,$(VENV),tests/requirements.txt)
	touch $@

$(BENCH_VENV)/.installed: requirements.txt $(LOCK) experiments/evidence/bench/requirements.txt
	$(call install,$(BENCH_VENV),experiments/evidence/bench/requirements.txt)
	touch $@

$(CONFORMANCE_VENV)/.installed: requirements.txt $(LOCK) assets/recipes/conformance/requirements.txt
	$(call install,$(CONFORMANCE_VENV),requirements.txt)
	$(CONFORMANCE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-r assets/recipes/conformance/requirements.txt
	touch $@

# torchvision and its like come with vLLM for other builds of torch; nothing here needs them.
$(VLLM_VENV)/.installed: requirements.txt $(LOCK) tests/requirements.txt tests/requirements-vllm.txt
	$(call install,$(VLLM_VENV),tests/requirements.txt)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r tests/requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(CONFORMANCE_VENV) $(VLLM_VENV) output
