#!/usr/bin/env bash
# The tests on a fresh machine: installs the project with what they need, then runs them on two
# processes (WORKERS=n for another number).  PYTHON chooses the interpreter.  Arguments go to pytest:
#   PYTHON=python3.12 bash launch/test.sh -m "not slow"
# At most 40 minutes on two cores from nothing; compiled programs are kept in the user's cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(bash launch/setup.sh test)
exec "$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist worksteal "$@"
