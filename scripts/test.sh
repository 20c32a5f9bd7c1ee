#!/usr/bin/env bash
# Sets up .venv and runs all tests, real trainings included.  scripts/test.sh [pytest arguments], e.g. -m 'not slow'
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up cpu,dev
cd "$ROOT"
if (($#)); then exec .venv/bin/python -m pytest "$@"; fi
# Two at a time: a training starts up on one core. The quick ones first, so that a slip shows soon.
code=0
.venv/bin/python -m pytest -n 2 -m 'not slow' || code=$?
.venv/bin/python -m pytest -n 2 --dist loadscope -m slow --durations=25 || code=$?
exit "$code"
