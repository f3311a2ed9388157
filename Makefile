# The two commands are `make demo` and `make test`; each does all set-up that is missing.
# Paths are relative and programs run as modules, so that any checkout path works (spaces, quotes, %).

PY := .venv/bin/python
ARGS ?=
# Faults of whole meshes, weight transfers, hostile peers and foreign versions are tested beside what they disturb.
FAULTS := tests/faults tests/integration/test_trainer_ranks.py tests/integration/test_security.py \
  tests/unit/common/layouts/test_weight_sync.py tests/unit/buffer/test_redis_calls.py
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test faults chaos matrix lint types bench docs freeze clean

help:
	@echo 'make demo    a small language model learns sums (minutes; set-up included)'
	@echo 'make test    lint, types and all tests; one of them: make test ARGS="-k name"'
	@echo 'make faults  every fault test, the long ones too; their seeds are printed'
	@echo 'make chaos   kill -9 at random through a run: it ends with the bits of one that nobody disturbed'
	@echo 'make matrix  each role killed and stopped in each activity; both: ARGS="--steps 6" for a quick try'
	@echo 'make setup   .venv with pinned packages        make lint    ruff, import-linter'
	@echo 'make types   mypy --strict                     make bench   overhead of being decoupled'
	@echo 'make docs    regenerate generated pages        make freeze  accept a changed public surface'
	@echo 'make clean   remove build outputs and caches, not .venv and not runs/'

setup:
	@sh deploy/setup.sh

demo: setup
	$(PY) -m rlmq.cli up recipes/demo.yaml --fresh $(ARGS)

test: lint types
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

faults: setup
	$(PY) -m pytest $(FAULTS) -n 2 -m '' -rP -o faulthandler_timeout=1300 $(ARGS)

chaos: setup
	PYTHONPATH=tests $(PY) -m chaos.chaos $(ARGS)

matrix: setup
	PYTHONPATH=tests $(PY) -m chaos.matrix $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	bash tests/types_tree.sh
	PYTHONPATH=build/types $(PY) -c 'from importlinter.cli import lint_imports_command as main; main()' --no-logo

types: setup
	bash tests/types_tree.sh
	$(PY) -m mypy -p rlmq
	$(PY) -m mypy benchmarks recipes docs/tutorials

bench: setup
	$(PY) -m rlmq.cli bench overhead $(ARGS)

docs: setup
	$(PY) -m rlmq.common.recipe.reference >docs/recipe.md.new
	mv docs/recipe.md.new docs/recipe.md

freeze: setup
	$(PY) tests/policy/frozen.py --write

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -rf common/api/*.egg-info *.egg-info
