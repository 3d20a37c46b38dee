#!/usr/bin/env bash
# sanitize.sh asan|tsan : builds the C++ tests with that preset and runs them.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

preset=$1
cmake --preset "$preset" -DEMBERMAP_DEPS="${EMBERMAP_DEPS:-}" -DPython_EXECUTABLE="$PWD/.venv/bin/python"
cmake --build --preset "$preset" -j "$(job_count)"
# ThreadSanitizer's memory map does not fit every address that randomisation may choose.
steady=()
if [[ $preset == tsan ]] && setarch "$(uname -m)" -R true 2>/dev/null; then steady=(setarch "$(uname -m)" -R); fi
"${steady[@]}" ctest --preset "$preset" --no-tests=error -j "$(nproc)"
