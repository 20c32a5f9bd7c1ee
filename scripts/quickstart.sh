#!/usr/bin/env bash
# From a fresh clone to a rising reward curve on this machine, no accelerator: sets up .venv, runs the quickstart notebook.
#   scripts/quickstart.sh [-p NAME VALUE]...     parameters of notebooks/00_quickstart.ipynb, e.g. -p steps 20
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,3s/^# *//p' "${BASH_SOURCE[0]}"; exit 0; fi
set_up cpu
cd "$ROOT"
say "running notebooks/00_quickstart.ipynb: a warm start once (one to three minutes), then the training (about four)"
.venv/bin/recipes notebook notebooks/00_quickstart.ipynb "$@"
say "open it:  .venv/bin/jupyter lab notebooks/00_quickstart.ipynb"
