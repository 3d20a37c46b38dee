# The front door: `make demo` and `make test` take a fresh clone to a result, installing what the machine lacks.
# Everything the targets do is in tools/setup/*.sh and CMakeLists.txt; lib.sh there lists the variables they read.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help demo test build bench benchmarks format lint asan tsan fuzz clean system python

export EMBERMAP_DEPS EMBERMAP_OFFLINE EMBERMAP_SYSTEM_PYTHON PYTHON JOBS

help:  ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 13
	@echo "Variables: EMBERMAP_DEPS=DIR  EMBERMAP_OFFLINE=1  EMBERMAP_SYSTEM_PYTHON=1  PYTHON=PROGRAM  JOBS=N  ARGS='options of demo, bench or benchmarks'"

demo: build  ## train word vectors of a dictionary, out of core, and look at them
	@tools/setup/system.sh demo
	@.venv/bin/python python/examples/word2vec.py $(ARGS)

test: build  ## run all C++ and Python tests
	@tools/setup/test.sh

build: system python  ## install what is missing, compile, and install into .venv
	@tools/setup/build.sh

system:
	@tools/setup/system.sh build

python: system
	@tools/setup/python.sh

bench: build  ## compile and run the benchmarks
	@tools/setup/system.sh bench
	@tools/setup/bench.sh $(ARGS)

benchmarks: build  ## compare with other stores, and make docs/benchmarks.md: NAME='2 cores, one disk'
	@tools/setup/system.sh demo
	@tools/setup/python.sh benchmarks
	@.venv/bin/python tools/bench/report.py run --name "$(or $(NAME),$(shell nproc) cores)" $(ARGS)

format: build  ## rewrite C++ and Python files in the project's style
	@tools/setup/system.sh format
	@tools/setup/python.sh lint
	@tools/setup/lint.sh format

lint: build  ## check style, types and likely mistakes; changes nothing
	@tools/setup/system.sh lint
	@tools/setup/python.sh lint
	@tools/setup/lint.sh check

asan: system python  ## run the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@tools/setup/sanitize.sh asan

tsan: system python  ## run the C++ tests under ThreadSanitizer
	@tools/setup/sanitize.sh tsan

fuzz: system  ## give random input to what reads files, with clang: SECONDS=60 for each target, TARGETS='manifest npy'
	@FUZZ_SECONDS='$(or $(SECONDS),60)' TARGETS='$(TARGETS)' tools/setup/fuzz.sh

clean:  ## remove what was built (.venv stays)
	rm -rf build demo-store .pytest_cache .mypy_cache .ruff_cache
