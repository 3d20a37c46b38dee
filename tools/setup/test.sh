#!/usr/bin/env bash
# test.sh : all tests of the build in build/release: C++ and the command line through ctest, Python through pytest. Both always run; fails if
# either fails or runs no test.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

status=0
say "C++ tests"
ctest --test-dir build/release --output-on-failure --no-tests=error -j "$(nproc)" || status=1
say "Python tests"
.venv/bin/python -m pytest || status=1
if ((status != 0)); then fail "tests failed"; fi
say "all tests passed"
