# make train [CONFIG=configs/small.py] [ARGS="--steps=100"]    set up, then train
# make test [ARGS="-m ''"]                                     set up, then run the quick tests [all]
# make setup [EXTRA=cuda|tpu] [PYTHON=python3.12]              set up alone

PYTHON ?= python3
CONFIG ?= configs/small.py
ARGS ?=
EXTRA ?=
VENV := .venv
BIN := $(VENV)/bin
comma := ,
EXTRAS := dev$(if $(EXTRA),$(comma)$(EXTRA))
# One stamp for each choice of extras, made anew when pyproject.toml changes.
STAMP := $(VENV)/installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: train test setup check

train: setup
	$(BIN)/python train.py --config=$(CONFIG) $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

setup: $(STAMP)

$(STAMP): pyproject.toml
	@if command -v uv >/dev/null; then \
		test -x $(BIN)/python || uv venv --quiet --python $(PYTHON) $(VENV); \
		uv pip install --quiet --python $(BIN)/python -e ".[$(EXTRAS)]"; \
	else \
		test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"; \
	fi
	@touch $@
