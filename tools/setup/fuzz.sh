#!/usr/bin/env bash
# fuzz.sh : builds the fuzz targets of tests/fuzz with clang and runs each for FUZZ_SECONDS (60). What they find stays in build/fuzz/found;
# inputs that reach new code are kept in build/fuzz/corpus for the next time.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

have clang++ || fail "make fuzz needs clang++ with libFuzzer (Debian and Ubuntu: apt install clang); 'make test' runs the same targets without"
cmake --preset fuzz -DEMBERMAP_DEPS="${EMBERMAP_DEPS:-}"
cmake --build --preset fuzz -j "$(job_count)"
mkdir -p build/fuzz/found
status=0
for source in tests/fuzz/*_fuzz.cpp; do
  name=$(basename "$source" _fuzz.cpp)
  [[ -z "${TARGETS:-}" || " $TARGETS " == *" $name "* ]] || continue
  say "fuzzing $name for ${FUZZ_SECONDS:-60} seconds"
  mkdir -p "build/fuzz/corpus/$name"
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "build/fuzz/tests/fuzz/${name}_fuzz" "build/fuzz/corpus/$name" "tests/fuzz/corpus/$name" \
    -max_total_time="${FUZZ_SECONDS:-60}" -max_len=65536 -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=128 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="build/fuzz/found/$name-" || status=1
done
if ((status != 0)); then fail "inputs that break something are in build/fuzz/found; mended, they go to tests/fuzz/corpus"; fi
say "nothing found"
