#!/usr/bin/env bash
# Sets up .venv and runs all tests, real trainings included.  scripts/test.sh [pytest arguments], e.g. -m 'not slow'
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up cpu,dev
cd "$ROOT"
exec .venv/bin/python -m pytest "$@"
