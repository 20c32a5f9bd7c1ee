"""Plan → a Dockerfile that builds the image of a stack: one layer a step, so that a build resumes where it stopped."""

from __future__ import annotations

import textwrap

from recipes.stack.plan import Action, Fetch, OnPath, Pip, Plan, Step, Uninstall
from recipes.stack.quoting import line, quote

SYSTEM_PACKAGES = ("build-essential", "cmake", "curl", "git", "jq", "libnuma-dev", "vim", "wget")
PREFIX = "/opt/stack"

_HEAD = """\
# syntax=docker/dockerfile:1
# Stack {stack} for {hardware}: {title}.
# Written by `recipes stack dockerfile {stack} --hardware {hardware}`. Change params/stacks/{stack}.yaml, not this.
#
#   docker build --tag {stack}:{device} --file THIS_FILE .
#   --build-arg BASE_IMAGE=…            the same image from a registry of yours
#   --build-arg PIP_EXTRA_INDEX_URL=…   where torch_npu and triton-ascend are, if not on pip's own index
ARG BASE_IMAGE={image}
# hadolint ignore=DL3006
FROM ${{BASE_IMAGE}}

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG SOC_VERSION={soc}
ARG ASCEND_HOME=/usr/local/Ascend
ENV PIP_NO_CACHE_DIR=1 \\
    PIP_ROOT_USER_ACTION=ignore
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# The distribution's own versions, whichever the base image brings: they build, and do not run in training.
# hadolint ignore=DL3008
RUN apt-get update \\
 && apt-get install --yes --no-install-recommends {system} \\
 && rm -rf /var/lib/apt/lists/*

# CANN's variables and the driver's stubs to link against, for every shell of the build and of the container. CANN's
# scripts read variables that are not set, so strict mode is off while they run, and set again where it was.
# What is quoted here expands where it is read.
# hadolint ignore=SC2016
RUN mkdir -p {prefix} \\
 && printf '%s\\n' \\
      'if [ -z "${{STACK_ENV:-}}" ]; then' \\
      '  export STACK_ENV=1' \\
      '  case "$-" in *u*) strict=1 ;; *) strict=0 ;; esac' \\
      '  set +u' \\
      "  source ${{ASCEND_HOME}}/ascend-toolkit/set_env.sh" \\
      "  source ${{ASCEND_HOME}}/nnal/atb/set_env.sh" \\
      "  devlib=${{ASCEND_HOME}}/cann-{cann}/$(uname -m)-linux/devlib/linux/$(uname -m)" \\
      '  export LD_LIBRARY_PATH="${{devlib}}${{LD_LIBRARY_PATH:+:${{LD_LIBRARY_PATH}}}}"' \\
      '  if [ "${{strict}}" = 1 ]; then set -u; fi' \\
      '  unset strict devlib' \\
      'fi' >{prefix}/env.sh \\
 && echo 'source {prefix}/env.sh' >>/etc/bash.bashrc
ENV BASH_ENV={prefix}/env.sh

# What pip may not move while it installs the rest. What is in dispute is not here; it is settled at its own step.
RUN python3 -c 'import sys; sys.exit(sys.version_info[:2] != {version})' \\
 && printf '%s\\n' \\
{constraints}
      >{prefix}/constraints.txt
"""

_TAIL = """
WORKDIR /workspace
CMD ["/bin/bash"]
"""


def dockerfile(plan: Plan) -> str:
    """Return the Dockerfile. The base image has no registry host: where it comes from is the builder's affair."""
    stack = plan.stack
    major, minor = stack.python.split(".")
    head = _HEAD.format(
        stack=stack.name,
        hardware=plan.hardware.name,
        title=stack.title,
        device=plan.hardware.image,
        image=plan.image,
        soc=quote(plan.hardware.soc),
        cann=stack.cann,
        prefix=PREFIX,
        system=" ".join(SYSTEM_PACKAGES),
        constraints="\n".join(f"      {quote(pin)} \\" for pin in plan.constraints),
        version=f"({major}, {minor})",
    )
    return head + "\n" + "\n".join(_step(step) for step in plan.steps) + _TAIL


def _step(step: Step) -> str:
    comment = "\n".join(f"# {line}" for line in textwrap.wrap(f"{step.name}: {step.why}", 116))
    inside = {action.inside for action in step.actions if isinstance(action, Pip) and action.inside}
    place = f"WORKDIR {PREFIX}/{inside.pop()}\n" if inside else f"WORKDIR {PREFIX}\n"
    commands = [command for action in step.actions for command in _action(action)]
    return f"{comment}\n{place}RUN " + " \\\n && ".join(commands) + "\n"


def _action(action: Action) -> list[str]:
    if isinstance(action, Fetch):
        r = action.repository
        place = f"{PREFIX}/{quote(r.name)}"
        if action.full:
            bring = [f"git -C {place} fetch --quiet --tags origin"]
        else:
            # A host that gives no single commits is asked for the ref with its history.
            bring = [
                f"{{ git -C {place} fetch --quiet --depth 1 origin {r.commit}"
                f" || git -C {place} fetch --quiet origin {quote(r.ref)}; }}"
            ]
        return [
            f"git init --quiet {place}",
            f"git -C {place} remote add origin {quote(r.url)}",
            *bring,
            f"git -C {place} checkout --quiet --detach {r.commit}",
            f"git -C {place} submodule --quiet update --init --recursive",
        ]
    if isinstance(action, OnPath):
        r = action.repository
        folder = quote(f"{PREFIX}/{r.name}" + (f"/{r.subdirectory}" if r.subdirectory else ""))
        site = """\"$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')\""""
        return [f"printf '%s\\n' {folder} >{site}/{quote(r.name)}.pth"]
    if isinstance(action, Uninstall):
        return [f"python3 -m pip uninstall --yes {' '.join(map(quote, action.names))}"]
    words = ("python3", "-m", "pip", "install", "--no-cache-dir", "--constraint", f"{PREFIX}/constraints.txt")
    call = line([*words, *action.arguments], indent=6)
    return [f"{' '.join(map(quote, action.environment))} {call}".strip() if action.environment else call]
