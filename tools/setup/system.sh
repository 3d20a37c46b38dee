#!/usr/bin/env bash
# system.sh GROUP... : sees to it that Debian's packages of these groups are there, and installs those that are missing.
# A package counts as present if what it provides is found, wherever that comes from: a program on the PATH, a header where the
# compiler looks or under EMBERMAP_DEPS. So nothing is installed, and no network needed, on a machine that has what it takes.
# Groups: build, demo, bench, format, lint, python.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

include_folders() {
  local path
  if [[ -n "${EMBERMAP_DEPS:-}" ]]; then printf '%s\n' "$EMBERMAP_DEPS/include"; fi
  for path in ${CPATH:+${CPATH//:/ }} ${CPLUS_INCLUDE_PATH:+${CPLUS_INCLUDE_PATH//:/ }}; do printf '%s\n' "$path"; done
  for path in ${CMAKE_PREFIX_PATH:+${CMAKE_PREFIX_PATH//[:;]/ }} /usr /usr/local; do printf '%s\n' "$path/include"; done
}
mapfile -t includes < <(include_folders)

# have_header NAME...: true if one of the names lies in one of the folders the compiler and CMake look in.
have_header() {
  local name folder
  for name in "$@"; do
    for folder in "${includes[@]}"; do
      if [[ -e "$folder/$name" ]]; then return 0; fi
      # Debian keeps headers that differ between architectures one folder deeper.
      if compgen -G "$folder/*-linux-gnu*/$name" >/dev/null; then return 0; fi
    done
  done
  return 1
}

missing=()
need() {  # need PACKAGE TEST...
  local package=$1
  shift
  "$@" || missing+=("$package")
}
have_compiler() { have "${CXX:-g++}"; }

for group in "$@"; do
  case $group in
    build)
      need g++ have_compiler
      need cmake have cmake
      need ninja-build have ninja
      need libhdf5-dev have_header hdf5.h hdf5/serial/hdf5.h
      need libxxhash-dev have_header xxhash.h
      need zlib1g-dev have_header zlib.h
      need liburing-dev have_header liburing.h
      need libboost-dev have_header boost/interprocess/mapped_region.hpp
      need libcli11-dev have_header CLI/CLI.hpp
      need libfmt-dev have_header fmt/format.h
      need nlohmann-json3-dev have_header nlohmann/json.hpp
      need libgtest-dev have_header gtest/gtest.h
      need libgmock-dev have_header gmock/gmock.h
      ;;
    demo) need dict-gcide test -e /usr/share/dictd/gcide.dict.dz ;;
    bench) need libbenchmark-dev have_header benchmark/benchmark.h ;;
    format) need clang-format have clang-format ;;
    lint)
      need clang-format have clang-format
      need clang-tidy have clang-tidy
      ;;
    python)  # asked for by python.sh when no Python on the machine will do
      missing+=(python3-venv python3-dev)
      ;;
    *) fail "system.sh: no group called '$group'" ;;
  esac
done

if ((${#missing[@]} == 0)); then exit 0; fi

by_hand="install them yourself (apt-get install ${missing[*]})"
case "$*" in
  python) by_hand+=", or name a Python 3.10 to 3.14 with headers: PYTHON=PROGRAM" ;;
  build) by_hand+=", or name a folder that has them: EMBERMAP_DEPS=DIR, laid out like /usr" ;;
esac
say "missing Debian packages: ${missing[*]}"
if enabled "${EMBERMAP_OFFLINE:-}"; then fail "EMBERMAP_OFFLINE is set, so nothing is installed. Missing: ${missing[*]}; $by_hand"; fi
have apt-get || fail "this machine has no apt-get. Missing: ${missing[*]}; $by_hand"
as_root=()
if ((EUID != 0)); then
  have sudo || fail "installing packages needs root or sudo, and neither is here. Missing: ${missing[*]}; $by_hand"
  as_root=(sudo)
fi
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2 -o Acquire::http::Timeout=20 "$@"; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Package lists may be absent or out of date: they are fetched only if the packages cannot be had without.
install() { apt install --no-install-recommends "${missing[@]}" >"$log" 2>&1; }
say "installing ${missing[*]}${as_root:+ (with sudo)}"
if ! install; then
  say "fetching the package lists"
  apt update >"$log" 2>&1 || true
  if ! install; then
    tail -n 15 "$log" >&2
    fail "could not install: ${missing[*]}; $by_hand"
  fi
fi
