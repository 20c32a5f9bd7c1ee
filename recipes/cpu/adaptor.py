"""The external module verl imports when VERL_USE_EXTERNAL_MODULES names it: importing it installs the CPU target.

It does nothing when it was not named there, or when an accelerator is present (one line in the log says so), and
refuses with a sentence when a package it changes has a version it was not written for.
"""

import importlib.metadata
import logging
import os

KNOWN_VERSIONS: dict[str, tuple[str, ...]] = {
    "torch": ("2.11.0",),
    "verl": ("0.9.1",),
    "megatron-core": ("0.18.0",),
    "megatron-bridge": ("0.5.1",),
    "transformers": ("5.8.1",),
}
"""Distributions whose code is changed, with the versions it was read and tested in."""

logger = logging.getLogger(__name__)


class UnknownVersion(RuntimeError):
    """An installed package has a version the CPU target was not written for."""


def was_named() -> bool:
    """Whether VERL_USE_EXTERNAL_MODULES names this module."""
    return __name__ in (name.strip() for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","))


def accelerator() -> str | None:
    """The accelerator torch can use in this process, in words; None when there is none."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} CUDA device(s)"
    npu = getattr(torch, "npu", None)  # torch_npu registers it while torch is imported
    if npu is not None and npu.is_available():
        return f"{npu.device_count()} NPU(s)"
    return None


def check_versions(known: dict[str, tuple[str, ...]] = KNOWN_VERSIONS) -> None:
    """Raise UnknownVersion for the first distribution of `known` that is missing or has another version."""
    for name, versions in known.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found.partition("+")[0] not in versions:
            raise UnknownVersion(
                f"recipes.cpu.adaptor knows {name} {' or '.join(versions)}, and this environment has {found}. It "
                f"changes code of {name}, and would have to guess. Install the package's `cpu` extra, which pins these "
                "versions, or leave recipes.cpu.adaptor out of VERL_USE_EXTERNAL_MODULES."
            )


def install() -> None:
    """Check, then install every stand-in and patch; those of other packages run when these are imported."""
    if not was_named():
        return
    found = accelerator()
    if found is not None:
        logger.warning(
            "recipes.cpu.adaptor changes nothing, because torch sees %s. To train on the CPU all the same, hide them "
            "(CUDA_VISIBLE_DEVICES= , ASCEND_RT_VISIBLE_DEVICES= ); to train on them, unset VERL_PLATFORM and "
            "VERL_ENGINE_DEVICE.",
            found,
        )
        return
    check_versions()

    from recipes.cpu import bridge, cluster_job, fork_server, hf_glm, megatron, platform, torch_cuda, verl_patches

    fork_server.install()  # first: it imports while the rest of this process does
    cluster_job.install()
    torch_cuda.install()
    platform.register()
    verl_patches.install()
    megatron.install()
    bridge.install()
    hf_glm.install()


install()
