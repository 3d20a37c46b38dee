#!/usr/bin/env bash
# build.sh : compiles everything into build/release and installs the package into .venv as an editable one (changes of Python files count at
# once), with the command line beside it. What did not change is not compiled again.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(job_count)}
log=$PWD/build/build.log
mkdir -p build
say "building in build/release with $CMAKE_BUILD_PARALLEL_LEVEL jobs (log: build/build.log)"
settings=(
  --config-settings=build-dir=build/release
  --config-settings=cmake.define.EMBERMAP_TESTS=ON
  --config-settings=cmake.define.EMBERMAP_NN=AUTO
  --config-settings=cmake.define.EMBERMAP_DEPS="${EMBERMAP_DEPS:-}"
)
# pip says what the build says only at -v, between much else: progress, our own notes and whatever went wrong are shown.
if ! .venv/bin/python -m pip --disable-pip-version-check install -v --no-index --no-build-isolation --no-deps "${settings[@]}" -e . 2>&1 |
  tee "$log" | grep --line-buffered -E '^ *(\[[1-9][0-9]*/[0-9]+\]|-- embermap|FAILED:|CMake (Error|Warning))|(error|warning|Error): '; then
  # Also reached when grep found nothing to show, which is no failure.
  if ! grep -q '^Successfully installed embermap' "$log"; then
    # What went wrong stands before pip's and the backend's own words about it.
    if grep -q 'FAILED: ' "$log"; then
      sed -n '/FAILED: /,/ninja: build stopped/p' "$log" | grep -v '^ *\[[0-9]*/[0-9]*\]' | head -n 60 >&2
    else
      tail -n 60 "$log" >&2
    fi
    fail "the build failed; the whole log is in build/build.log"
  fi
fi
