#!/usr/bin/env bash
# Makes a virtual environment with the project in it:  bash launch/setup.sh [extra,extra...]
#
# Needs Python >= 3.11 and pip, or uv.  Minutes on the first run, seconds after.  PYTHON chooses the
# interpreter, VENV the folder (default .venv; with PYTHON set, .venv-<version>).  Prints what it does
# on stderr and the environment's folder, alone, on stdout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup: $*" >&2; }
die() {
  say "$*"
  exit 1
}

python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
  die "$python does not run. Install Python 3.11 or newer, or name one: PYTHON=/path/to/python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "$python is Python $version; 3.11 or newer is needed. Name another: PYTHON=/path/to/python3.12"
if [[ -n ${PYTHON:-} ]]; then venv=${VENV:-.venv-$version}; else venv=${VENV:-.venv}; fi

# uv, because only it can leave out seqio (and with it TensorFlow), which JetStream's metadata names.
# A private copy goes into .cache: pip --target works without venv, without root and where the
# system's Python is "externally managed".
export UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
uv=uv
if ! "$uv" --version >/dev/null 2>&1; then
  uv=$PWD/.cache/uv/bin/uv
  if ! "$uv" --version >/dev/null 2>&1; then
    say "fetching uv into .cache/uv"
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --user >&2 ||
      die "$python has no pip. Install it (Debian: apt-get install python3-pip) or install uv."
    "$python" -m pip install --quiet --upgrade --target .cache/uv uv >&2 ||
      die "pip could not install uv. Check its network settings, or install uv another way."
  fi
fi

if [[ -x $venv/bin/python ]]; then
  found=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' || echo broken)
  [[ $found != broken ]] || die "$venv is broken. Remove it, or choose another folder: VENV=.venv2"
  [[ -z ${PYTHON:-} || $found == "$version" ]] ||
    die "$venv holds Python $found, not $version. Remove it, or choose a folder: VENV=.venv-$version"
  version=$found
else
  [[ ! -e $venv ]] || die "$venv exists and is no virtual environment. Remove it, or set VENV."
  "$uv" venv --quiet --python "$python" "$venv" >&2
fi
say "installing into $venv (Python $version)"
"$uv" pip install --quiet --python "$venv/bin/python" --editable ".${1:+[$1]}" >&2 ||
  die "the installation failed; the lines above say why"

# The sandbox that whole programs need.  Without it the arithmetic evaluator stands in.
if ! command -v bwrap >/dev/null && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  say "installing bubblewrap"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y bubblewrap; } \
    >/dev/null 2>&1 || true
fi
command -v bwrap >/dev/null || say "no bubblewrap: sandbox.backend=auto will evaluate arithmetic only"

echo "$venv"
