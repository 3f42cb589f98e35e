# Set-up needs Python 3.10 or newer and pip; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off --no-compile -c constraints.txt
NUMERICAL := $(addprefix tests/test_,$(addsuffix .py,functional backbones metrics significance ood geometry modules \
	torchmetrics kernels_cpu kernels_linear data_batches)) $(addprefix src/gsoftmax/,functional.py losses.py heads \
	gaussians.py geometry.py metrics.py significance.py ood.py schedules.py torchmetrics.py backbones)
SOURCES := pyproject.toml setup.py constraints.txt src/gsoftmax/kernels/native.c src/gsoftmax/kernels/native_terms.h

# Bytecode is written when a module is first imported, so that of torch's thousands only those in use are compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-isa test-slow lint docs bench evidence-tables clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       compare softmax, L-softmax and G-softmax on the bundled digits"
	@echo "make test       the test suite"
	@echo "make test-isa   the numerical tests again, as on processors without AVX-512 and without AVX2"
	@echo "make test-slow  every recipe's smoke run and other tests that take minutes"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the documentation, in docs/_build/html"
	@echo "make bench      speed on this CPU (GPU: python -m benchmarks.gpu)"
	@echo "make evidence-tables  the pages of docs/evidence from the rows in results/evidence"

setup: .venv/all

# What the demo needs: torch, NumPy and five small packages.
.venv/demo: $(SOURCES)
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[demo]'
	@touch $@

# What the tests, the documentation and the examples need as well.
.venv/all: .venv/demo
	$(PIP) -e '.[all]'
	@touch $@

demo: .venv/demo
	$(BIN)/gsoftmax compare digits --out runs/demo

test: setup
	$(BIN)/python -m pytest -q -n 2 -rs

# Without AVX2, and with AVX2 but without AVX-512: what ATen, oneDNN, MKL and our own kernel do on such processors.
test-isa: setup
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(BIN)/python -m pytest -q -n 2 $(NUMERICAL)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(BIN)/python -m pytest -q -n 2 $(NUMERICAL)

test-slow: setup
	$(BIN)/python -m pytest -q -n 2 -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/python -m sphinx -E -W --keep-going -n -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

evidence-tables: setup
	$(BIN)/python -m evidence.pages

bench: setup
	$(BIN)/python -m benchmarks.cpu

clean:
	rm -rf .venv build dist runs .pytest_cache .ruff_cache .mypy_cache
