# Every command a developer needs. `make` alone lists them.
#
#   VENV=path      virtual environment to create and use
#   PYTHON=path    interpreter it is made with (3.11 or later)

VENV ?= .venv
PYTHON ?= $(firstword $(shell command -v python3.11 || command -v python3))
PYTEST_ARGS ?=
BENCH_ARGS ?=
COVERAGE_ARGS ?=
OUT ?= out
DEMO_METHODS ?= window,block_sparse
DEMO_BUDGET ?= ppl=2%

PY := $(VENV)/bin/python
SUBQUAD := $(VENV)/bin/subquad
INSTALLED := $(VENV)/.subquad-installed
INSTALLED_MODELS := $(VENV)/.subquad-installed-models

# pip builds the package in an environment of its own, which -c does not reach.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-models test-node test-browser test-gpu-schedules lint format \
  bench bench-must bench-full coverage method-docs models clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

install: $(INSTALLED)  ## create $(VENV) with the pinned versions of constraints.txt

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed; name it with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install --quiet --editable '.[cpu,text,convert,kernels,dev]'
	@touch $@

$(INSTALLED_MODELS): $(INSTALLED)
	$(PY) -m pip install --quiet --editable '.[cpu,text,convert,kernels,tune,dev,models]'
	@touch $@

DEMO := $(OUT)/demo
DEMO_TEXTS := $(OUT)/demo-texts

demo: $(INSTALLED)  ## plan and convert the small model in examples/, check it, time it; 5 minutes
	$(SUBQUAD) inspect examples/demo_model
	$(PY) examples/demo_texts.py $(DEMO_TEXTS)
	$(SUBQUAD) convert examples/demo_model $(DEMO) --budget $(DEMO_BUDGET) \
	  --data $(DEMO_TEXTS)/calibration --lengths 1024,4096 --methods $(DEMO_METHODS) --kernels cpu --overwrite
	$(SUBQUAD) validate $(DEMO) --data $(DEMO_TEXTS)/test.txt --budget $(DEMO_BUDGET) \
	  --lengths 1024,4096 --paddings left --rows 8
	$(SUBQUAD) bench $(DEMO) --lengths 128,1024,4096 --time-limit 40
	@echo
	@echo "The artifact is $(DEMO); what was done and why is in $(DEMO)/report.html."
	@echo "Run it: $(SUBQUAD) run $(DEMO) --text 'def main('"

test: $(INSTALLED)  ## fast tests (leaves out the markers slow, models, node, browser, gpu_schedules)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 \
	  -m "not slow and not models and not node and not browser and not gpu_schedules" $(PYTEST_ARGS)

test-all: $(INSTALLED_MODELS)  ## every test; downloads checkpoints, needs Node.js and npm
	$(PY) -m pytest $(PYTEST_ARGS)

test-models: $(INSTALLED_MODELS)  ## real checkpoints only, about ten minutes
	$(PY) -m pytest -m models $(PYTEST_ARGS)

test-node: $(INSTALLED)  ## artifacts in other ONNX Runtimes; needs Node.js and npm
	$(PY) -m pytest tests/node $(PYTEST_ARGS)

test-browser: $(INSTALLED)  ## the report page in Chromium (apt-get install chromium)
	$(PY) -m pytest -m browser $(PYTEST_ARGS)

test-gpu-schedules: $(INSTALLED)  ## GPU kernels on this CPU; needs PoCL (apt-get install pocl-opencl-icd)
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/gpu -m gpu_schedules $(PYTEST_ARGS)

lint: $(INSTALLED)  ## ruff, mypy, direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy tests
	$(VENV)/bin/lint-imports

format: $(INSTALLED)  ## let ruff write the layout and sort the imports
	$(VENV)/bin/ruff check --fix --exit-zero --select I .
	$(VENV)/bin/ruff format .

bench: $(INSTALLED_MODELS)  ## operators and models against ONNX Runtime and torch, 10 minutes
	$(PY) benchmarks/run.py $(BENCH_ARGS)

bench-must: $(INSTALLED_MODELS)  ## what must be reached, as a table; about an hour
	$(PY) benchmarks/run.py --set must $(BENCH_ARGS)

bench-full: $(INSTALLED_MODELS)  ## every length, one thread and all; up to four hours
	$(PY) benchmarks/run.py --set full $(BENCH_ARGS)

coverage: $(INSTALLED)  ## write docs/coverage.md: families x exporters; hours the first time, resumable
	PYTHONPATH=tests/support OMP_NUM_THREADS=1 $(PY) -W ignore -m zoo.report $(COVERAGE_ARGS)

method-docs: $(INSTALLED)  ## write docs/methods.md from the method files
	$(SUBQUAD) methods --markdown > docs/methods.md.part && mv docs/methods.md.part docs/methods.md

models: $(INSTALLED_MODELS)  ## download the checkpoints that tests and benchmarks use
	$(PY) tests/support/third_party.py

clean:  ## remove what make created, except the downloaded checkpoints
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  .hypothesis .import_linter_cache
