# make train [CONFIG=configs/small.py] [ARGS="--steps=100"]    set up, then train
# make chat [ARGS=--name=mine]                                 train the small run, fine-tune it, and talk to it
# make test [ARGS="-m ''"]                                     set up, then run the quick tests [all]
# make check                                                   lint, format, types, words, and which room imports which
# make docs                                                    check every link, and build the site: build/site/index.html
# make house                                                   how large the house is
# make setup [EXTRA=cuda|tpu] [PYTHON=python3.12]              set up alone, with the newest Python here unless named

CONFIG ?= configs/small.py
ARGS ?=
EXTRA ?=
VENV := .venv
BIN := $(VENV)/bin
comma := ,
EXTRAS := dev$(if $(EXTRA),$(comma)$(EXTRA))
# One stamp for each choice of extras, made again when pyproject.toml changes.
STAMP := $(VENV)/installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: train chat test setup check docs house

train: setup
	$(BIN)/python train.py --config=$(CONFIG) $(ARGS)

# The run that ARGS name.
TUNED := $(or $(patsubst --run_dir=%,%,$(filter --run_dir=%,$(ARGS))),runs/$(or $(patsubst --name=%,%,$(filter --name=%,$(ARGS))),chat))

# A run that is complete has a summary.
chat: setup
	test -f runs/small/summary.json || $(BIN)/python train.py --config=configs/small.py
	$(BIN)/python train.py --config=configs/chat.py --init_from=runs/small $(ARGS)
	$(BIN)/python chat.py --run_dir=$(TUNED)

test: setup
	$(BIN)/python -m pytest -m "not (medium or slow)" $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.prose

docs:
	$(MAKE) setup EXTRA=docs
	$(BIN)/python -m tools.reference
	$(BIN)/zensical build --clean --strict

house: setup
	$(BIN)/python -m tests.house

setup: $(STAMP)

PYTHONS := $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
# Exits with 0 if the dependencies support this Python, otherwise with its version as an error.
SUITS := import sys; sys.exit(None if sys.version_info >= (3, 11) else "it is " + sys.version.split()[0])
VERSION := import sys; print(sys.version_info[:2])

$(STAMP): pyproject.toml
	@for python in $(PYTHONS); do \
		if problem=$$($$python -c '$(SUITS)' 2>&1); then break; fi; \
		problem="$$python: $$(echo "$$problem" | head -n 1)"; python=; \
	done; \
	if [ -z "$$python" ]; then \
		echo "error: no Python 3.11 or later runs here ($$problem); make setup PYTHON=... names one" >&2; exit 2; \
	fi; \
	if ! $(BIN)/python -c '$(SUITS)' 2>/dev/null || \
		[ -n "$(PYTHON)" -a "$$($(BIN)/python -c '$(VERSION)')" != "$$($$python -c '$(VERSION)')" ]; then \
		rm -rf $(VENV); \
	fi; \
	if command -v uv >/dev/null; then \
		test -d $(VENV) || uv venv --quiet --python "$$(command -v $$python)" $(VENV) || exit 2; \
		uv pip install --quiet --python $(BIN)/python -e ".[$(EXTRAS)]"; \
	else \
		$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $$python -m venv $(VENV); } || exit 2; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[$(EXTRAS)]"; \
	fi
	@touch $@
