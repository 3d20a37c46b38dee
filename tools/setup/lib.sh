# shellcheck shell=bash
# Shared by the scripts in this folder, which the Makefile calls from the root of the tree. Sourced, not run.
#
# Read from the environment:
#   EMBERMAP_DEPS=DIR           a folder laid out like /usr (include/, lib/) with headers and libraries that the system lacks
#   EMBERMAP_OFFLINE=1          never try the network
#   EMBERMAP_SYSTEM_PYTHON=1    use the Python packages that python3 already has; install none
#   PYTHON=PROGRAM              the Python to make .venv from
#   JOBS=N                      compile jobs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

say() { printf 'embermap: %s\n' "$*"; }
fail() {
  printf 'embermap: error: %s\n' "$*" >&2
  exit 1
}
enabled() { [[ -n "${1:-}" && "$1" != 0 ]]; }
have() { command -v "$1" >/dev/null 2>&1; }

if [[ -n "${EMBERMAP_DEPS:-}" ]]; then
  [[ -d "$EMBERMAP_DEPS" ]] || fail "EMBERMAP_DEPS=$EMBERMAP_DEPS is not a directory"
  EMBERMAP_DEPS=$(cd "$EMBERMAP_DEPS" && pwd)
  export EMBERMAP_DEPS
fi

# Cores this process may use, but at most one job per 2 GiB of memory (what a translation unit of torch's headers takes).
job_count() {
  if [[ -n "${JOBS:-}" ]]; then
    echo "$JOBS"
    return
  fi
  local cores kib limit jobs
  cores=$(nproc)
  kib=$(awk '/^MemTotal:/ {print $2}' /proc/meminfo)
  for limit in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
    [[ -r $limit ]] || continue
    limit=$(<"$limit")
    if [[ $limit =~ ^[0-9]{1,15}$ ]] && ((limit / 1024 < kib)); then kib=$((limit / 1024)); fi
  done
  # A machine of 8 GiB reports a little less.
  jobs=$(((kib + 512 * 1024) / (2 * 1024 * 1024)))
  ((jobs > cores)) && jobs=$cores
  ((jobs < 1)) && jobs=1
  echo "$jobs"
}
