# Two commands for a fresh machine: `make rehearse` and `make test`. Each does its own set-up and may be repeated.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
  $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
INVENTORY ?= inventory/rehearsal.yml
export PATH := $(CURDIR)/$(BIN):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

.DEFAULT_GOAL := help
.PHONY: help setup lock docs lint unit integration molecule test rehearse rehearse-down benchmark test-aarch64

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## Make .venv from the hashed lock

$(VENV)/.ready: requirements/controller.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "found: no Python 3.11 to 3.13 with venv; needed: one; do: apt-get install python3 python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/controller.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

lock: ## Resolve the Python packages anew (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url \
	  --no-emit-find-links --extra controller pyproject.toml --output-file requirements/controller.lock
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url \
	  --no-emit-find-links --no-emit-package hf-xet --constraint requirements/controller.lock pyproject.toml \
	  --output-file requirements/node.lock  # our own transfer moves the bytes, so no node needs 4 MB of xet

docs: setup ## Write docs/variables.md anew
	python docs/generate.py

lint: setup ## Check style, types and spelling
	ruff check .
	ruff format --check .
	mypy
	yamllint --strict .
	ansible-lint --profile production
	codespell

unit: setup ## Run the unit tests (seconds, no root, no Docker)
	pytest tests/unit --numprocesses 2

integration: setup ## Run the tests that need root, network namespaces, sshd or a Docker engine
	python -m rehearsal provide
	pytest -rs tests/integration

molecule: setup ## Rehearse the whole life of a pair and verify it
	python -m rehearsal provide
	molecule test --scenario-name default

test: lint unit integration molecule ## Everything

rehearse: setup ## Bring up two nodes, run site.yml on them, ask the served model
	python -m rehearsal up
	ansible-playbook --inventory $(INVENTORY) site.yml
	python -m rehearsal ask

rehearse-down: setup ## Remove everything that the rehearsal made
	python -m rehearsal down

benchmark: setup ## Measure what design promises, as ratios within one run
	python -m benchmarks

test-aarch64: setup ## Run the library's tests and the fixtures in an emulated aarch64 userland
	python -m tests.aarch64
