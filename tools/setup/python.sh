#!/usr/bin/env bash
# python.sh [lint|benchmarks] : sees to it that .venv holds a Python with the pinned packages (with `lint` or `benchmarks`: what those need
# besides, too). A stamp in .venv makes
# a second call quick. Where no package index can be reached and python3 already has the packages, .venv uses those and installs nothing.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

venv=$PWD/.venv
python=$venv/bin/python
modules=(torch numpy h5py ml_dtypes safetensors nanobind scikit_build_core pytest)
requirements=(python/requirements.txt)
stamp=$venv/.embermap-stamp
extra=${1:-}
case $extra in
  '') ;;
  lint)
    modules=(ruff mypy)
    requirements=(python/requirements-lint.txt)
    stamp=$venv/.embermap-lint-stamp
    ;;
  benchmarks)
    modules=(lmdb matplotlib)
    requirements=(python/requirements-bench.txt)
    stamp=$venv/.embermap-bench-stamp
    ;;
  *) fail "python.sh: no group called '$extra'" ;;
esac

# absent PYTHON MODULE... : prints those that the Python cannot import. Finding a module does not run it: torch alone takes seconds.
absent() {
  "$1" -c 'import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])' "${@:2}"
}

# unfit PROGRAM: prints why .venv cannot be made from it; nothing if it can.
unfit() {
  have "$1" || { echo "not found"; return; }
  "$1" - 2>/dev/null <<'PY' || echo "does not run"
import importlib.util, os, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
if not (3, 10) <= sys.version_info[:2] <= (3, 14):
    print("is version %s, and 3.10 to 3.14 is needed" % version)
elif not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    print("(%s) has no headers: Python.h is missing" % version)
elif importlib.util.find_spec("venv") is None:
    print("(%s) has no venv module" % version)
elif importlib.util.find_spec("ensurepip") is None and importlib.util.find_spec("pip") is None:
    print("(%s) has neither ensurepip nor pip" % version)
PY
}

# Sets `base` to the Python to use, or leaves it empty with the reasons in `reasons`.
choose() {
  local program why
  base='' reasons=''
  for program in ${PYTHON:-python3 /usr/bin/python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
    why=$(unfit "$program")
    if [[ -z "$why" ]]; then
      base=$("$program" -c 'import sys; print(sys.executable)')
      return
    fi
    [[ "$why" == "not found" && -z "${PYTHON:-}" ]] || reasons+="${reasons:+; }$program $why"
  done
}

# Only what is asked for counts: the same stamp whichever way the packages came.
wanted() {
  {
    echo "$venv ${PYTHON:-}"
    cat "${requirements[@]}" python/constraints.txt
  } | sha256sum | cut -d' ' -f1
}

works() { [[ -x $python ]] && "$python" -c 'import pip' >/dev/null 2>&1; }

ready() {
  local mode key
  [[ -r $stamp ]] && read -r mode key <"$stamp" && [[ $key == "$(wanted)" ]] && works || return 1
  [[ $mode == system ]] || ! enabled "${EMBERMAP_SYSTEM_PYTHON:-}"
}
done_as() { echo "$1 $(wanted)" >"$stamp"; }

make_venv() {  # make_venv [OPTION]...
  if [[ -e $venv && ! -e $venv/.embermap-made ]]; then
    fail ".venv is in the way: make did not create it and cannot use it as it is; move it away"
  fi
  rm -rf "$venv"
  # Debian leaves ensurepip out of python3 itself; a Python that has pip all the same does without.
  if "$base" -c 'import ensurepip' 2>/dev/null; then
    "$base" -m venv "$@" "$venv"
  else
    "$base" -m venv --without-pip "$@" "$venv"
  fi
  touch "$venv/.embermap-made"
}

use_system_packages() {
  make_venv --system-site-packages
  # From inside a virtual environment, --system-site-packages means those of the Python it was made from, not its own.
  "$base" - "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" <<'PY'
import pathlib, sys, sysconfig
if sys.prefix != sys.base_prefix:
    paths = sysconfig.get_paths()
    lines = ["import site; site.addsitedir(%r)\n" % path for path in sorted({paths["purelib"], paths["platlib"]})]
    pathlib.Path(sys.argv[1], "embermap-outer.pth").write_text("".join(lines))
PY
  local gone
  gone=$(absent "$python" "${modules[@]}" pip)
  [[ -z "$gone" ]] || fail ".venv does not see $gone of $base"
  done_as system
}

index_answers() {
  local folder
  folder=$(mktemp -d)
  timeout 15 "$base" -m pip --disable-pip-version-check download -q --no-deps --retries 0 --timeout 5 -d "$folder" \
    -c python/constraints.txt iniconfig >/dev/null 2>&1 && rm -rf "$folder" && return
  rm -rf "$folder"
  return 1
}

install_pinned() {
  local quiet=()
  [[ -t 1 ]] || quiet=(-q)
  "$python" -m pip --disable-pip-version-check install "${quiet[@]}" --only-binary :all: --retries 3 "${requirements[@]/#/-r}" || return 1
  local gone
  gone=$(absent "$python" "${modules[@]}")
  [[ -z "$gone" ]] || fail "installed, and yet .venv lacks $gone"
  done_as pinned
}

if ready; then exit 0; fi

if [[ -n "$extra" ]]; then
  gone=$(absent "$python" "${modules[@]}")
  [[ -z "$gone" ]] && enabled "${EMBERMAP_SYSTEM_PYTHON:-}${EMBERMAP_OFFLINE:-}" && done_as system && exit 0
  if enabled "${EMBERMAP_OFFLINE:-}"; then fail "EMBERMAP_OFFLINE is set, and .venv lacks $gone"; fi
  say "installing ${modules[*]} into .venv"
  install_pinned || fail "could not install ${modules[*]} into .venv"
  exit 0
fi

choose
if [[ -z "$base" ]]; then
  say "no fitting Python: ${reasons:-none found}"
  if [[ -n "${PYTHON:-}" ]]; then fail "PYTHON=$PYTHON will not do: ${reasons#"$PYTHON" }"; fi
  tools/setup/system.sh python
  choose
  [[ -n "$base" ]] || fail "no Python 3.10 to 3.14 with headers, venv and pip: $reasons"
fi
version=$("$base" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
gone=$(absent "$base" "${modules[@]}" pip)

if enabled "${EMBERMAP_SYSTEM_PYTHON:-}"; then
  [[ -z "$gone" ]] || fail "EMBERMAP_SYSTEM_PYTHON is set, but $base ($version) lacks $gone"
  say ".venv uses the packages of $base ($version), as EMBERMAP_SYSTEM_PYTHON asks; nothing is installed"
  use_system_packages
elif works && [[ -z "$(absent "$python" "${modules[@]}")" ]] && enabled "${EMBERMAP_OFFLINE:-}"; then
  say ".venv is kept with the packages it has; EMBERMAP_OFFLINE is set, so their versions are not brought to the pinned ones"
  done_as pinned
elif [[ -z "$gone" ]] && { enabled "${EMBERMAP_OFFLINE:-}" || ! index_answers; }; then
  say ".venv uses the packages of $base ($version), for no package index can be reached; nothing is installed"
  use_system_packages
elif enabled "${EMBERMAP_OFFLINE:-}"; then
  fail "EMBERMAP_OFFLINE is set, and $base ($version) lacks $gone: install them for it (python/requirements.txt), or unset EMBERMAP_OFFLINE"
else
  if works && [[ ! -r $stamp || $(<"$stamp") != system* ]]; then
    say "bringing .venv to the pinned Python packages"
  else
    say "making .venv from $base ($version)"
    make_venv
  fi
  say "installing the packages of python/requirements.txt into .venv (torch brings CUDA's libraries: 5 GB of disk, once)"
  install_pinned || fail "could not install the Python packages of python/requirements.txt. Without a network: a python3 that already has \
${modules[*]} is used as it is with EMBERMAP_SYSTEM_PYTHON=1"
fi
