"""Plan → a bash script that installs a stack on a node: strict, resumable, every value quoted."""

from __future__ import annotations

import textwrap

from recipes.stack.plan import Action, Fetch, OnPath, Plan, Step, Uninstall
from recipes.stack.quoting import line, quote

_HEAD = """\
#!/usr/bin/env bash
# Installs stack {stack}
# for {hardware}: {title}.
#
# Written by `recipes stack install {stack} --hardware {hardware}`. Change params/stacks/{stack}.yaml, not this.
#
#   bash install.sh              install, or go on where an earlier run stopped
#   PREFIX=/some/folder          where the checkouts go (default: ./{stack})
#   PYTHON=/some/python          the interpreter to install into (default: python3); must be {python}
#   ASCEND_HOME=/some/folder     where CANN is (default: /usr/local/Ascend)
#
# pip asks the index it is set up for. torch_npu and triton-ascend may live on an index of their own, and on x86_64 the
# CPU build of torch does: name those in PIP_EXTRA_INDEX_URL.
set -euo pipefail

PREFIX="${{PREFIX:-"${{PWD}}"/{stack}}}"
PYTHON="${{PYTHON:-python3}}"
ASCEND_HOME="${{ASCEND_HOME:-/usr/local/Ascend}}"
DONE="${{PREFIX}}/.done"

say() {{ printf '%s\\n' "$*" >&2; }}
die() {{ say "error: $*"; exit 1; }}

# Says whether a step is still to be done. Its key is a hash of what it does, so a changed table is done again.
todo() {{
  if [[ "$(cat "${{DONE}}/$1" 2>/dev/null || true)" == "$2" ]]; then say "done before: $1"; return 1; fi
  say "== $1"
}}
finished() {{ printf '%s' "$2" >"${{DONE}}/$1.new" && mv "${{DONE}}/$1.new" "${{DONE}}/$1"; }}

# Brings a checkout to one commit, and refuses to touch changes somebody made in it.
fetch() {{
  local place="${{PREFIX}}/$1" url="$2" ref="$3" commit="$4" depth="$5"
  git init --quiet "${{place}}"
  git -C "${{place}}" config remote.origin.url "${{url}}"
  git -C "${{place}}" config remote.origin.fetch '+refs/heads/*:refs/remotes/origin/*'
  [[ -z "$(git -C "${{place}}" status --porcelain --untracked-files=no)" ]] ||
    die "${{place}} has changes of its own. Commit or remove them, then run this again."
  if ! git -C "${{place}}" cat-file -e "${{commit}}^{{commit}}" 2>/dev/null ||
    {{ [[ "${{depth}}" == full ]] && [[ "$(git -C "${{place}}" rev-parse --is-shallow-repository)" == true ]]; }}; then
    if [[ "${{depth}}" == full ]]; then
      if [[ "$(git -C "${{place}}" rev-parse --is-shallow-repository)" == true ]]; then
        git -C "${{place}}" fetch --quiet --tags --unshallow origin
      else
        git -C "${{place}}" fetch --quiet --tags origin
      fi
    elif ! git -C "${{place}}" fetch --quiet --depth 1 origin "${{commit}}"; then
      say "   ${{url}} gives no single commits: fetching ${{ref}} with its history"
      git -C "${{place}}" fetch --quiet origin "${{ref}}"
    fi
  fi
  git -C "${{place}}" cat-file -e "${{commit}}^{{commit}}" 2>/dev/null ||
    die "${{url}} has no commit ${{commit}} (${{ref}}). Was it rewritten? Compare with 'recipes stack show --remote'."
  git -C "${{place}}" checkout --quiet --detach "${{commit}}"
  git -C "${{place}}" submodule --quiet update --init --recursive
}}

install() {{ "${{PYTHON}}" -m pip install --constraint "${{PREFIX}}/constraints.txt" "$@"; }}

for tool in git flock; do command -v "${{tool}}" >/dev/null || die "${{tool}} is missing."; done
[[ "$("${{PYTHON}}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" == {python} ]] ||
  die "${{PYTHON}} is not Python {python}. Name the right one in PYTHON."
mkdir -p "${{DONE}}"
PREFIX="$(cd "${{PREFIX}}" && pwd)"
DONE="${{PREFIX}}/.done"
exec 9>"${{PREFIX}}/.lock"
flock --nonblock 9 || die "another installation is at work in ${{PREFIX}}."

# CANN's own scripts read variables that are not set, which strict mode would end on.
set +u
for script in "${{ASCEND_HOME}}/ascend-toolkit/set_env.sh" "${{ASCEND_HOME}}/nnal/atb/set_env.sh"; do
  [[ -r "${{script}}" ]] || die "${{script}} is missing. Install CANN {cann}, or name its folder in ASCEND_HOME."
  # shellcheck source=/dev/null
  source "${{script}}"
done
set -u
# Linking needs the driver's stubs; a node that only builds has no driver.
ARCH="$(uname -m)"
DEVLIB="${{ASCEND_HOME}}/cann-{cann}/${{ARCH}}-linux/devlib/linux/${{ARCH}}"
export LD_LIBRARY_PATH="${{DEVLIB}}${{LD_LIBRARY_PATH:+:${{LD_LIBRARY_PATH}}}}"
export SOC_VERSION={soc}

# What pip may not move while it installs the rest. What is in dispute is not here; it is settled at its own step.
cat >"${{PREFIX}}/constraints.txt" <<'END'
{constraints}
END
"""

_TAIL = """
say "Stack {stack} is installed. Where the workbook is: recipes stack verify {stack} --python \\"${{PYTHON}}\\""
"""


def script(plan: Plan) -> str:
    """Return the script. The same plan gives the same text."""
    stack = plan.stack
    head = _HEAD.format(
        stack=stack.name,
        hardware=plan.hardware.name,
        title=stack.title,
        python=stack.python,
        cann=stack.cann,
        soc=quote(plan.hardware.soc),
        constraints="\n".join(plan.constraints),
    )
    context = "\n".join((*plan.constraints, plan.hardware.soc))
    steps = [_step(index, step, context) for index, step in enumerate(plan.steps, 1)]
    return head + "\n" + "\n".join(steps) + _TAIL.format(stack=stack.name)


def _step(index: int, step: Step, context: str) -> str:
    mark = quote(f"{index:02}-{step.name.replace(' ', '-')}")
    lines = [f"# {line}" for line in textwrap.wrap(f"{step.name}: {step.why}", 116)]
    lines.append(f"if todo {mark} {step.key(context)}; then")
    lines += [f"  {command}" for action in step.actions for command in _action(action)]
    lines += [f"  finished {mark} {step.key(context)}", "fi"]
    return "\n".join(lines) + "\n"


def _action(action: Action) -> list[str]:
    if isinstance(action, Fetch):
        r = action.repository
        return [f"fetch {quote(r.name)} {quote(r.url)} {quote(r.ref)} {r.commit} {'full' if action.full else '1'}"]
    if isinstance(action, OnPath):
        r = action.repository
        folder = f'"${{PREFIX}}"/{quote(r.name + ("/" + r.subdirectory if r.subdirectory else ""))}'
        site = """\"$("${PYTHON}" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')\""""
        return [f"printf '%s\\n' {folder} >{site}/{quote(r.name)}.pth"]
    if isinstance(action, Uninstall):
        return [f'"${{PYTHON}}" -m pip uninstall --yes {" ".join(map(quote, action.names))}']
    call = line(["install", *action.arguments], indent=6)
    before = [f'cd "${{PREFIX}}"/{quote(action.inside)}'] if action.inside else []
    before += [f"export {' '.join(map(quote, action.environment))}"] if action.environment else []
    # Folder and variables of one installation end with its subshell.
    return ["(", *[f"  {command}" for command in (*before, call)], ")"] if before else [call]
