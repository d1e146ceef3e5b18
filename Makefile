# `make serve` and `make test` need nothing but Python 3.11 or 3.12; everything else is installed into $(VENV),
# what tests SGLang into $(VENV)-sglang.
VENV   ?= .venv
PORT   ?= 8000
# The release tested here; any index that offers a CPU build of it saves gigabytes on machines without a GPU:
# make serve PIP_EXTRA_INDEX_URL=<your CPU index>
TORCH  ?= torch==2.13.0
# Versions that the tests passed with; empty takes what pip resolves today: make serve PINS= TORCH=torch==2.12.0
PINS   ?= -c deploy/constraints.txt
# SGLang's tests: the release that the engine and the plugin are for, the newest one, what goes with TORCH (SGLang
# imports torchvision, the kernels' interpreter is Triton), the pins of their environment.
SGLANG        ?= sglang==0.5.17
SGLANG_NEWEST ?= sglang==0.5.23
TORCHVISION   ?= torchvision==0.28.0
TRITON        ?= triton==3.7.1
SGLANG_PINS   ?= $(if $(PINS),-c tests/engines/sglang/constraints.txt)
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)

# Of `make gpu-e2e`, which makes no environment.
GPU_PYTHON ?= python3

BIN  := $(VENV)/bin
BASE := $(VENV)/.base
DEV  := $(VENV)/.dev
LOAD := $(VENV)/.load
SGL  := $(VENV)-sglang
# setuptools warns of every editable installation, at length.
EDITABLE := PYTHONWARNINGS="ignore:Editable installation"
# Under a name of its own: a recipe that names $(MAKE) is run by make -n too, tests and all.
AGAIN := $(MAKE) --no-print-directory
ASKED := pyproject.toml deploy/constraints.txt
# The laptop's load: small lengths, few users. LOAD_ARGS adds to it: make load LOAD_ARGS="--shape steps --users 8"
LOAD_RUN := --scale 0.35 --users 4 --duration 60 --goodput ttft=2.0,tpot=0.25 --out load-report

.PHONY: serve test test-full test-sglang lint bench load soak gpu-e2e setup model dashboards monitor constraints clean
.DEFAULT_GOAL := help

.PHONY: help
help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## */  make \1\t/' | expand -t 22

$(VENV)/bin/python $(SGL)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)
	$@ -m pip install -q --upgrade pip

# Torch first and on its own: a later, wider requirement would otherwise replace the build that was chosen here.
$(BASE): $(ASKED) | $(VENV)/bin/python
	@echo "Installing PyTorch and the package; some minutes, gigabytes where the index has only CUDA builds."
	$(BIN)/python -m pip install -q $(PINS) "$(TORCH)"
	$(EDITABLE) $(BIN)/python -m pip install -q $(PINS) -e .
	@touch $@

$(DEV): $(ASKED) $(BASE)
	$(EDITABLE) $(BIN)/python -m pip install -q $(PINS) -e ".[dev]"
	@touch $@

setup: $(DEV)  ## create the environment with the development tools

model: $(BASE)  ## fetch the laptop model into the cache
	$(BIN)/python -m serve_app.models fetch smollm2-135m

serve: model  ## serve the laptop model on PORT (8000)
	$(BIN)/python -m serve_app.launch --port $(PORT)

# Both suites run to their ends; whichever fails, this does.
test: $(DEV) model  ## the whole test suite, and test-sglang
	@failed=0; $(BIN)/python -m pytest $(PYTEST_ARGS) || failed=1; \
	$(AGAIN) test-sglang || failed=1; exit $$failed

# An environment of its own: SGLang's pins are not the rest's. It requires gigabytes of CUDA, which nothing here runs.
$(SGL)/.ready: Makefile pyproject.toml $(addprefix tests/engines/sglang/,requirements.txt constraints.txt) | $(SGL)/bin/python
	@echo "Installing SGLang without its CUDA dependencies."
	$(SGL)/bin/python -m pip install -q $(SGLANG_PINS) "$(TORCH)"
	$(EDITABLE) $(SGL)/bin/python -m pip install -q $(SGLANG_PINS) -e . -r tests/engines/sglang/requirements.txt
	$(SGL)/bin/python -m pip install -q --no-deps "$(SGLANG)" "$(TORCHVISION)"
	rm -rf $(SGL)/newest
	$(SGL)/bin/python -m pip install -q --no-deps --target $(SGL)/newest "$(SGLANG_NEWEST)"
	@touch $@

test-sglang: $(SGL)/.ready  ## the plugin and the engine over released SGLang, on a CPU
	$(SGL)/bin/python -m serve_app.models fetch smollm2-135m
	CUDA_VISIBLE_DEVICES= SGLANG_NEWEST=$(abspath $(SGL)/newest) PYTHONPATH=$(CURDIR)/tests/engines/sglang/cpu_kernels \
	  $(SGL)/bin/python -m pytest tests/sglang_plugin tests/engines/sglang tests/deploy/test_sglang_args.py $(SGLANG_ARGS)

test-full: $(DEV) model  ## the suite with what takes long: greedy identity on fifty prompts, larger failures (most of an hour)
	IDENTITY_PROMPTS=50 FULL_TESTS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(DEV)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy serve_app

bench: $(BASE) model  ## tokens/s of the embedded engine, as ratios of one run
	$(BIN)/python -m benchmarks.local_engine

dashboards: $(BASE)  ## write the Grafana dashboards' JSON from their source
	$(BIN)/python -m dashboards

monitor: $(BASE)  ## run a Prometheus against the application on PORT
	$(BIN)/python -m deploy.monitoring.run --application http://127.0.0.1:$(PORT)

$(LOAD): $(ASKED) $(BASE)
	$(EDITABLE) $(BIN)/python -m pip install -q $(PINS) -e ".[load]"
	@touch $@

load: $(LOAD) model  ## load the server on PORT, or one started for it; report in load-report/
	$(BIN)/python -m load_tests run --start --url http://127.0.0.1:$(PORT) $(LOAD_RUN) $(LOAD_ARGS)

soak: $(LOAD) model  ## half an hour of load with killed replicas, readers who leave and invalid bodies
	$(BIN)/python -m load_tests soak $(SOAK_ARGS)

# With the machine's own PyTorch and, in $$SITE, SGLang and Ray.
gpu-e2e:  ## on a GPU machine: serve with SGLang, measure, break, report (docs/sglang.md); E2E_ARGS="--stages kill"
	tests/gpu/run_sglang.sh $(GPU_PYTHON) -m deploy.gpu_e2e $(E2E_ARGS)

constraints: $(BASE)  ## pin anew what pip resolves today (deploy/constraints.txt); run the tests before you commit it
	$(BIN)/python -m deploy.pins deploy/constraints.txt "$(TORCH)" ".[dev,gpu]"
	$(BIN)/python -m deploy.pins tests/engines/sglang/constraints.txt "$(TORCH)" "$(TRITON)" . -r tests/engines/sglang/requirements.txt

clean:  ## remove the environments
	rm -rf $(VENV) $(SGL)
