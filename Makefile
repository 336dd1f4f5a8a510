# make demo             the whole pipeline on two real vLLM servers (CPU); ENGINE=sim for the double
# make train-demo       TRL trains a tiny model over two real vLLM servers (CPU, minutes); ends with a picture
# make test             every test, real engine included; two at a time (JOBS=2)
# make quick            unit and integration tests, without engine and training: 3 minutes
# make check            ruff, format, mypy, import contracts
# make docs             the site in build/site, made of the pages; a warning fails
# make bench            benchmarks, into benchmarks/results/
# make soak             many versions on the double; 100,000 steps of each simulation; chaos behind the router
# make venv | engine    build .venv: package and tools | adds vLLM, TRL and PEFT
# make clean            remove .venv and what tools left behind
#
# ARGS="..." is passed on to the command behind demo, test, quick and soak.

SHELL := /bin/bash
ENGINE ?= vllm
JOBS ?= 2
BIN := .venv/bin
SETUP = $(PYTHON) scripts/environment.py
PYTEST = $(BIN)/python -m pytest -n $(JOBS)
BENCHMARKS = $(shell grep -l '^    main[^a-z]' benchmarks/*.py)

# The first that runs and is new enough; a version manager's shim may exist and not run.
PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)

.DEFAULT_GOAL := help
.PHONY: help venv engine demo train-demo test quick check docs bench soak clean python

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

python:
	@[ -n "$(PYTHON)" ] || { echo "policyline needs Python 3.11 or newer; python3 is $$(python3 --version 2>&1)." \
		"Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }

venv: python
	@$(SETUP) dev

engine: python
	@$(SETUP) engine

ifeq ($(ENGINE),sim)
demo: venv
	@$(BIN)/policyline demo --engine sim $(ARGS)
else
demo: python
	@engine=$$($(SETUP) choose) && exec $(BIN)/policyline demo --engine "$$engine" $(ARGS)
endif

train-demo: python
	@$(SETUP) engine && exec $(BIN)/python examples/train_demo.py $(ARGS)

test: python
	@$(SETUP) choose >/dev/null && exec $(PYTEST) $(ARGS)

quick: JOBS = 3
quick: venv  # much of it waits, and none of it needs much memory
	@exec $(PYTEST) -m "not engine" tests/unit tests/contract tests/integration $(ARGS)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: venv
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . build/site

bench: venv
	@mkdir -p benchmarks/results; failed=0; \
	for file in $(BENCHMARKS); do \
		name=$$(basename "$$file" .py); echo "== $$name" >&2; \
		$(BIN)/python "$$file" --json > "benchmarks/results/$$name.json" || failed=1; \
	done; exit $$failed

soak: venv
	@$(BIN)/policyline demo --engine sim --replicas 4 --versions 400 $(ARGS)
	@POLICYLINE_SIMULATION=soak $(BIN)/python -m pytest tests/simulation -s
	@POLICYLINE_CHAOS_ROUNDS=100 $(BIN)/python -m pytest tests/acceptance/test_router_chaos.py
	@POLICYLINE_TRL_STEPS=20 $(BIN)/python -m pytest tests/acceptance/test_router_trl.py
	@POLICYLINE_SIMULATION=soak $(BIN)/python -m pytest tests/integration/training \
		tests/acceptance/test_training_ratio.py -k "steps_on_two_servers or ratio_stays" -s

clean:
	rm -rf .venv .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
