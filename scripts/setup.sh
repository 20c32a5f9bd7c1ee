#!/usr/bin/env bash
# Sets up .venv beside this folder: finds a Python 3.12, installs the workbook and what it trains with.
# Sourced by quickstart.sh and test.sh. Safe to run again, to run twice at once, and to resume after an interruption.
#   set_up EXTRAS     e.g. set_up cpu,dev
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

is_python_312() { [ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.12 ]; }

# Prints the path of a Python 3.12. A pyenv shim may be on PATH and still not run, so every candidate is tried.
find_python() {
  local candidate
  for candidate in python3.12 python3 python; do
    if candidate="$(command -v "$candidate")" && is_python_312 "$candidate"; then echo "$candidate"; return; fi
  done
  for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    if [ -x "$candidate" ] && is_python_312 "$candidate"; then echo "$candidate"; return; fi
  done
  if command -v uv >/dev/null && candidate="$(uv python find 3.12 2>/dev/null)" && is_python_312 "$candidate"; then
    echo "$candidate"; return
  fi
  die "no Python 3.12 found. Get one with 'uv python install 3.12', 'pyenv install 3.12' or your package manager, then run this again."
}

# Runs a command with its output in the log, a dot every ten seconds on a terminal, and the log's end if it fails.
quietly() {
  local log="$VENV/setup.log" pid began=$SECONDS
  "$@" >>"$log" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null || true; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    if [ -t 2 ]; then printf '\r  %d s' $((SECONDS - began)) >&2; fi
  done
  trap - INT TERM
  if [ -t 2 ]; then printf '\r' >&2; fi
  if ! wait "$pid"; then
    tail -n 5 "$log" >&2
    die "setting up stopped here (above: the end of $log). Nothing is lost: run the same command again to go on."
  fi
}

# Prints a list of [tool.recipes] in pyproject.toml, a line each.
listed() {
  "$VENV/bin/python" -c '
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["tool"]["recipes"][sys.argv[2]], sep="\n")' "$ROOT/pyproject.toml" "$1"
}

set_up() {
  local extras="$1" python stamp
  command -v flock >/dev/null || die "flock is missing (package util-linux): it keeps two set-ups apart."
  exec 9>"$ROOT/.setup.lock"
  flock -n 9 || { say "another set-up is running in $ROOT; waiting for it"; flock 9; }
  # Interrupted before it had a pip, or made by a Python that is gone: nothing in it is worth keeping.
  if [ -d "$VENV" ] && ! { is_python_312 "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }; then
    say "the environment in .venv does not run; making it again"
    rm -rf "$VENV"
  fi
  if [ ! -x "$VENV/bin/python" ]; then
    python="$(find_python)"
    say "making .venv with $("$python" --version)"
    "$python" -m venv "$VENV" || die "'$python -m venv' failed (on Debian: install python3.12-venv)."
  fi
  # The stamp is written last, so an interrupted installation is taken up again; pip keeps what it has fetched.
  stamp="$VENV/.installed-${extras//,/-}-$(cksum <"$ROOT/pyproject.toml" | cut -d' ' -f1)"
  if [ ! -e "$stamp" ]; then
    say "installing (about 6 GB, a few minutes; log: .venv/setup.log)"
    # One call, so that pip sees all pins together; then what needs a word of its own (see pyproject.toml for the reasons).
    quietly "$VENV/bin/python" -m pip install --editable "${ROOT}[$extras]"
    mapfile -t packages < <(listed no-deps)
    quietly "$VENV/bin/python" -m pip install --no-deps "${packages[@]}"
    mapfile -t packages < <(listed without)
    quietly "$VENV/bin/python" -m pip uninstall --yes "${packages[@]}"
    touch "$stamp"
  fi
  flock -u 9
  exec 9>&-
}
