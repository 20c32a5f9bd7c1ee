"""verl's platform "cpu": gloo, main memory, and a Ray resource of its own for a training rank."""

import resource
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase

from recipes.cpu.ranks import RANK_RESOURCE

_KIB = 1024


def _used_now() -> int:
    return psutil.Process().memory_info().rss


def _used_at_most() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def _free_and_total() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> ModuleType:
    """What verl gets from `get_torch_device()`: the part of torch.cuda's interface it uses, told by the CPU.

    Memory is that of the process (verl.workers.engine_workers reports it as actor/perf/max_memory_*).
    """
    module = ModuleType("recipes.cpu.device")
    nothing = {
        name: lambda *args, **kwargs: None for name in ("empty_cache", "ipc_collect", "set_device", "synchronize")
    }
    vars(module).update(
        nothing,
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: 1,
        get_device_name=lambda device=None: "CPU",  # the key of verl.utils.flops_counter's table of peak FLOPS
        is_available=lambda: True,
        max_memory_allocated=lambda device=None: _used_at_most(),
        max_memory_reserved=lambda device=None: _used_at_most(),
        memory_allocated=lambda device=None: _used_now(),
        memory_reserved=lambda device=None: _used_now(),
        mem_get_info=lambda device=None: _free_and_total(),
    )
    return module


class PlatformCPU(PlatformBase):
    """The platform verl selects with VERL_PLATFORM=cpu."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # chosen by VERL_PLATFORM only, never by verl's detection

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"  # verl wants a name; nothing sets or reads it

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return RANK_RESOURCE

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def register() -> None:
    """Make VERL_PLATFORM=cpu known to verl.plugin.platform.platform_manager."""
    from verl.plugin.platform.platform_manager import PlatformRegistry

    PlatformRegistry.register(platform="cpu")(PlatformCPU)
