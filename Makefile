# make test, make bench, make lint: each sets up .venv first, once. ARGS go to the command: make bench ARGS=--suite

PYTHON ?= python3
VENV := .venv
ARGS ?=

# The CUDA version that the driver serves, nothing without a GPU: nvidia-smi calls it "CUDA Version", since driver 610 "CUDA UMD
# Version". It decides torch's build and the extra that matches it; setup.cfg bounds both.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA \(UMD \)*Version: *\([0-9]*\).*/\2/p')
ifeq ($(CUDA),)
TORCH := torch==2.13.0
EXTRA := cu13
else ifeq ($(CUDA),12)
TORCH := torch<2.11
EXTRA := cu12
else
TORCH := torch>=2.11
EXTRA := cu13
endif

.PHONY: test bench lint

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

bench: $(VENV)/installed
	$(VENV)/bin/python bench.py $(ARGS)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/installed: setup.cfg pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet '$(TORCH)' --editable '.[$(EXTRA),test,bench]'
	touch $@
