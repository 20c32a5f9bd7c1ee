#!/usr/bin/env bash
# Sets up .venv and runs all tests, real trainings included.  scripts/test.sh [pytest arguments], e.g. -m 'not slow'
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up cpu,dev
cd "$ROOT"
if (($#)); then exec .venv/bin/python -m pytest "$@"; fi
# The quick ones two at a time; real trainings take both cores, so they come one after the other.
code=0
.venv/bin/python -m pytest -n 2 -m 'not slow' || code=$?
.venv/bin/python -m pytest -m slow --durations=25 || code=$?
exit "$code"
