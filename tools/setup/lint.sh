#!/usr/bin/env bash
# lint.sh check  : style, types and likely mistakes of all files; fails if anything is found, changes nothing.
# lint.sh format : rewrites the files in the project's style.
# Needs the compile commands of build/release.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

folders=(base io kernels store nn tools python tests)
mapfile -t cpp < <(find "${folders[@]}" -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' | sort)
ruff=(.venv/bin/python -m ruff)

if [[ "${1:-}" == format ]]; then
  clang-format -i "${cpp[@]}"
  "${ruff[@]}" check --quiet --fix . || true  # what it cannot mend is reported by `make lint`
  "${ruff[@]}" format .
  exit 0
fi
[[ "${1:-}" == check ]] || fail "lint.sh: 'check' or 'format', not '${1:-}'"

status=0
step() {
  say "$1"
  "${@:2}" || status=1
}
step "clang-format" clang-format --dry-run -Werror "${cpp[@]}"
step "ruff check" "${ruff[@]}" check .
step "ruff format" "${ruff[@]}" format --check .
step "mypy" .venv/bin/python -m mypy
# Our own translation units but those that include torch or nanobind (minutes each, and their headers are not ours) and the kernels
# (compiled by nvcc). Compile commands made for g++ carry options that clang does not know.
mapfile -t tidy < <(find base io kernels store tools -name '*.cpp' -not -path 'tools/bench/*' | sort)
tidy_all() {
  local unknown=(--extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument)
  printf '%s\0' "${tidy[@]}" | xargs -0 -n 1 -P "$(job_count)" clang-tidy -p build/release --quiet "${unknown[@]}" 2> >(grep -v 'warnings\? generated\.$' >&2)
}
step "clang-tidy (${#tidy[@]} files)" tidy_all
if ((status != 0)); then fail "lint found something"; fi
say "lint is clean"
