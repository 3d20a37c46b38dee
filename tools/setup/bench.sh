#!/usr/bin/env bash
# bench.sh [OPTION]... : compiles the benchmarks in build/release and runs them; the options are Google Benchmark's
# (--benchmark_filter=tables/, --benchmark_filter=kernels/gather, --benchmark_min_time=0.01, ...).
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

cmake -S . -B build/release -DEMBERMAP_BENCHMARKS=ON >/dev/null
cmake --build build/release --target embermap_bench -j "$(job_count)"
build/release/tools/bench/embermap_bench "$@"
