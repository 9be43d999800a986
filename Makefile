# make train [CONFIG=configs/small.py] [ARGS=--name=mine]      set up, then train
# make chat [ARGS=--name=mine]                                 train the small run, fine-tune it, and talk to it
# make reinforce [ARGS="--seed=1 --name=second"]               fine-tune that run on sums, and improve it by reinforcement
# make test [ARGS="-m ''"]                                     set up, then run the quick tests [all]
# make check                                                   lint, format, types, imports
# make docs                                                    check every link, and build the site: build/site/index.html
# make setup [EXTRA=cuda|cuda12|tpu] [PYTHON=python3.12]       set up alone, with what the tests need; the driver chooses
#                                                              CUDA unless it is named
# make image [EXTRA=cuda,gcs] [PLATFORM=linux/amd64]           fetch wheels, and build the image `tokensum` from them
# The same command again continues what was interrupted. ARGS that change a result need a --name of their own.

CONFIG ?= configs/small.py
ARGS ?=
# What the first GPU and its driver support: CUDA 13 needs driver 580 and Turing (7.5), CUDA 12 driver 525.
CUDA := $(shell nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | \
	awk -F, 'NR == 1 && $$1 + 0 >= 525 { print ($$1 + 0 >= 580 && $$2 >= 7.5) ? "cuda" : "cuda12" }')
EXTRA ?= $(CUDA)
VENV := .venv
BIN := $(VENV)/bin
comma := ,
LIST := $(subst $(comma), ,$(EXTRA))
# What only tests and checks need takes half a minute to install: training does without.
DEV := $(if $(filter-out train chat reinforce,$(MAKECMDGOALS)),dev)
EXTRAS := $(subst $(empty) ,$(comma),$(strip $(DEV) $(LIST)))
# One stamp for each choice of extras, made again when pyproject.toml or constraints.txt changes. Stamps are deleted
# before what they mark.
STAMP := $(VENV)/installed-$(or $(subst $(comma),-,$(EXTRAS)),base)

.PHONY: train chat reinforce test setup check docs image

train: setup
	$(BIN)/python train.py --config=$(CONFIG) $(ARGS)

# The run that ARGS name.
TUNED := $(or $(patsubst --run_dir=%,%,$(filter --run_dir=%,$(ARGS))),runs/$(or $(patsubst --name=%,%,$(filter --name=%,$(ARGS))),chat))

# A row of small.py's size, so that no memory is measured. More answers are right than after one epoch (docs/chat.md).
CHAT := --config=configs/chat.py --init_from=runs/small --batch.rows_per_device=8 --epochs=1.5

# A run that is complete has a summary.
chat: setup
	test -f runs/small/summary.json || $(BIN)/python train.py --config=configs/small.py
	$(BIN)/python train.py $(CHAT) $(ARGS)
	$(BIN)/python chat.py --run_dir=$(TUNED)

# data.prepare refuses a file whose time has changed, so it is made once, and never half.
build/sums.jsonl: | setup
	mkdir -p build
	$(BIN)/python -m reinforcement.tasks > $@.partial
	mv $@.partial $@

# What exists is not made again: runs/small, runs/chat, build/sums.jsonl and runs/sums.
reinforce: setup build/sums.jsonl
	test -f runs/small/summary.json || $(BIN)/python train.py --config=configs/small.py
	test -f runs/chat/summary.json || $(BIN)/python train.py $(CHAT)
	$(BIN)/python -m data.prepare --source=build/sums.jsonl --conversations --out=build/sums --tokenizer=runs/chat/tokenizer
	test -f runs/sums/summary.json || \
		$(BIN)/python train.py --config=configs/chat.py --init_from=runs/chat --data.source=build/sums --name=sums \
		--batch.rows_per_device=8
	$(BIN)/python reinforce.py --config=configs/reinforce.py --init_from=runs/sums $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not (medium or slow)" $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

docs:
	$(MAKE) setup EXTRA=docs
	$(BIN)/python -m tools.reference
	$(BIN)/zensical build --clean --strict

# The image's own Python chooses the wheels. Its code is what is committed: no .env, no run.
image: FOR := $(or $(EXTRA),cuda)
image: FOR_PLATFORM := $(if $(PLATFORM),--platform=$(PLATFORM))
image:
	mkdir -p build/wheels
	docker run $(FOR_PLATFORM) --rm --volume="$(CURDIR)/build/wheels:/wheels" --volume="$(CURDIR)/pyproject.toml:/tokensum/pyproject.toml:ro" \
		--volume="$(CURDIR)/constraints.txt:/tokensum/constraints.txt:ro" \
		python:3.12-slim pip download --dest=/wheels --constraint=/tokensum/constraints.txt "/tokensum[$(FOR)]" setuptools
	git archive HEAD | docker build $(FOR_PLATFORM) --network=none --build-context=wheels=build/wheels --build-arg=PIP_NO_INDEX=1 --build-arg=EXTRA=$(FOR) \
		--tag=tokensum --file=launch/Dockerfile -

setup: $(STAMP)

# The newest Python has the faster JAX. One that pyenv has installed may not be on the path.
PYENV := $(lastword $(sort $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[2-9]*/bin/python3)))
PYTHONS := $(or $(PYTHON),python3.14 python3.13 python3.12 $(PYENV) python3.11 python3)
# Exits with 0 if the dependencies support this Python, otherwise with its version as an error.
SUITS := import sys; sys.exit(None if sys.version_info >= (3, 11) else "it is " + sys.version.split()[0])
VERSION := import sys; print(sys.version_info[:2])

HAS_12 := $(wildcard $(VENV)/installed-*cuda12*)
HAS_13 := $(filter-out $(HAS_12),$(wildcard $(VENV)/installed-*cuda*))

$(STAMP): pyproject.toml constraints.txt
	$(if $(filter cudacuda12,$(filter cuda,$(LIST))$(CUDA)),\
		$(error EXTRA=cuda needs driver 580 and a GPU of Turing or later; take EXTRA=cuda12 here, or CUDA= for others))
	$(if $(or $(and $(HAS_12),$(filter cuda,$(LIST))),$(and $(HAS_13),$(filter cuda12,$(LIST)))),\
		$(error $(VENV) has another CUDA than EXTRA=$(EXTRA); run rm -r $(VENV) first))
	@[ -n "$(CUDA)$(EXTRA)" ] || ! command -v nvidia-smi >/dev/null || \
		echo "nvidia-smi shows no GPU with driver 525 or later: this set-up is for the CPU" >&2
	@for python in $(PYTHONS); do \
		if problem=$$($$python -c '$(SUITS)' 2>&1); then break; fi; \
		problem="$$python: $$(echo "$$problem" | head -n 1)"; python=; \
	done; \
	if [ -z "$$python" ]; then \
		echo "error: no Python 3.11 or later runs here ($$problem); make setup PYTHON=... names one" >&2; exit 2; \
	fi; \
	if ! $(BIN)/python -c '$(SUITS)' 2>/dev/null || \
		[ -n "$(PYTHON)" -a "$$($(BIN)/python -c '$(VERSION)')" != "$$($$python -c '$(VERSION)')" ]; then \
		rm -rf $(VENV)/installed-* $(VENV); \
	fi; \
	echo "installing into $(VENV) with $$python; this takes minutes" >&2; \
	if command -v uv >/dev/null; then \
		test -d $(VENV) || uv venv --quiet --python "$$(command -v $$python)" $(VENV) || exit 2; \
		uv pip install --quiet --python $(BIN)/python --constraint constraints.txt -e ".$(EXTRAS:%=[%])"; \
	else \
		$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $$python -m venv $(VENV); } || exit 2; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
			-e ".$(EXTRAS:%=[%])"; \
	fi
	@touch $@
