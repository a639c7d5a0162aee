# build test bench lint docs clean. Each sets up what it needs in VENV; `make test` on a fresh
# machine with python3, python3-venv, g++ and make is enough.

PYTHON ?= python3
VENV ?= .venv
NVCC ?= yes     # no: without an nvcc on the machine, build the CPU library only
PYTEST_ARGS ?= -n 2 --dist worksteal

PY := $(VENV)/bin/python
BIN := $(VENV)/bin
SOURCES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# A torch that is installed is kept, if it is not too old. Elsewhere, without a GPU, its release is
# fixed, so that results repeat.
HAS_TORCH = -c "import sys, importlib.util as u; sys.exit(u.find_spec('torch') is None)"
TORCH = $(shell if $(PY) $(HAS_TORCH) || command -v nvidia-smi > /dev/null; \
  then echo 'torch>=2.10'; else echo torch==2.13.0; fi)
FIND_NVCC = -c "import setup, sys; sys.exit(setup.find_nvcc() is None)"
INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check
PACKAGE = --no-build-isolation --editable .
# The package is installed by then: pip adds what the extra names.
EXTRA = $(INSTALL) 'attnscope[$(1)]'

.PHONY: build test bench lint docs clean
.DELETE_ON_ERROR:

build: $(PY)
	$(INSTALL) '$(TORCH)' 'setuptools>=77' ninja
ifeq ($(strip $(NVCC)),yes)
	@$(PY) $(FIND_NVCC) || $(INSTALL) $(PACKAGE)'[nvcc]' \
	  || echo "attnscope: no nvcc on this machine and none from the package index"
endif
	$(PY) setup.py --quiet build_ext --inplace
	@test $(VENV)/.installed -nt pyproject.toml || { $(INSTALL) $(PACKAGE) && touch $(VENV)/.installed; }

$(PY):
	@if $(PYTHON) $(HAS_TORCH); then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi

test: build
	$(call EXTRA,test)
	$(PY) -m pytest $(PYTEST_ARGS)

bench: build
	$(BIN)/attnscope bench --suite quick --output build/bench/quick.json
	$(BIN)/attnscope plot build/bench/quick.json --output-dir build/bench/plots

lint: build
	$(call EXTRA,lint)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)
	$(PY) tools/check_tree.py

docs: build
	$(call EXTRA,docs)
	$(PY) tools/check_tree.py links
	$(PY) tools/site/make_site.py site

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache python/attnscope.egg-info
	rm -f python/attnscope/*.so python/attnscope/kernels.json
