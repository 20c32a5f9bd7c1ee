"""What Megatron-Core asks of torch.cuda without looking whether there is a GPU, answered by the CPU.

Only functions that raise on a machine without CUDA are replaced, so nothing that worked before changes.
`torch.cuda.is_available()` stays False.
"""

import functools
import sys
import time
from types import ModuleType

import torch
import torch.distributed

from recipes.cpu.replace import expect, replace

CPU = torch.device("cpu")


class Event:
    """torch.cuda.Event where everything before it has already happened."""

    def __init__(self, *args, **kwargs):
        self._recorded = None

    def record(self, stream=None) -> None:
        self._recorded = time.perf_counter()

    def wait(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between the two records."""
        return 1e3 * (end._recorded - self._recorded)


class Stream:
    """torch.cuda.Stream on a device that runs everything in order: waiting for it is never needed."""

    def __init__(self, *args, **kwargs):
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception) -> None:
        pass

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_the_stream = Stream()


def install() -> None:
    """Install all stand-ins below. Called once, before the first Megatron module is imported."""
    answer_device_queries()
    answer_streams_and_events()
    answer_random_state()
    keep_cuda_moves_on_cpu()
    call_cpu_tensors_cuda_in_optimizers()
    average_over_gloo()


def answer_device_queries() -> None:
    """torch.cuda.{current_device,synchronize,empty_cache}: used as the `device=` of nearly every Megatron buffer
    (megatron.core.distributed.param_and_grad_buffer, .tensor_parallel.mappings, .pipeline_parallel.p2p_communication).
    """
    replace(torch.cuda, "current_device", lambda: CPU, parameters="")
    replace(torch.cuda, "synchronize", lambda device=None: None, parameters="device")
    replace(torch.cuda, "empty_cache", lambda: None, parameters="")


def answer_streams_and_events() -> None:
    """torch.cuda.{Stream,Event,stream,current_stream}: MoE token dispatch and gradient reduction overlap copies and
    communication on side streams (megatron.core.transformer.moe.token_dispatcher, .distributed.param_and_grad_buffer).
    """
    replace(torch.cuda, "Stream", Stream)
    replace(torch.cuda, "Event", Event)
    replace(torch.cuda, "stream", lambda stream: _the_stream, parameters="stream")
    replace(torch.cuda, "current_stream", lambda device=None: _the_stream, parameters="device")


def answer_random_state() -> None:
    """torch.cuda.{get,set}_rng_state, manual_seed: Megatron keeps one random state a parallel group and switches
    between them (megatron.core.tensor_parallel.random). On the CPU that state is torch's default generator.
    """

    def get_rng_state(device="cuda"):
        return torch.random.get_rng_state()

    def set_rng_state(new_state, device="cuda"):
        torch.random.set_rng_state(new_state)

    def manual_seed(seed):
        torch.random.default_generator.manual_seed(int(seed))

    for module in (torch.cuda, torch.cuda.random):
        replace(module, "get_rng_state", get_rng_state, parameters="device")
        replace(module, "set_rng_state", set_rng_state, parameters="new_state device")
        replace(module, "manual_seed", manual_seed, parameters="seed")


def keep_cuda_moves_on_cpu() -> None:
    """Tensor.cuda() and Module.cuda() mean "to the accelerator" (megatron.bridge.models.model_provider,
    megatron.core.optimizer.optimizer): here the tensor is there already. Nor is there a device for which memory would
    be pinned (copy_megatron_model_to_cpu in verl.utils.megatron_utils).
    """
    replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    replace(torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self)
    replace(torch.nn.Module, "cuda", lambda self, device=None: self, parameters="self device")


def call_cpu_tensors_cuda_in_optimizers() -> None:
    """Tensor.type() as seen by megatron.core.optimizer: distrib_optimizer, optimizer and clip_grads sort parameters by
    comparing it with 'torch.cuda.FloatTensor' and refuse all other names. Other callers get the true name.
    """

    def type_name(self, *args, **kwargs):
        answer = true_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    true_type = replace(torch.Tensor, "type", type_name)


def average_over_gloo() -> None:
    """torch.distributed.all_reduce(op=AVG): gloo has no AVG, verl averages metrics with it
    (verl.workers.engine_workers). Divide, then sum.
    """

    def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        if op == torch.distributed.ReduceOp.AVG:
            tensor.div_(torch.distributed.get_world_size(group))
            op = torch.distributed.ReduceOp.SUM
        return summing(tensor, op=op, group=group, async_op=async_op)

    parameters = "tensor op group async_op"
    summing = replace(torch.distributed, "all_reduce", all_reduce, parameters=parameters)
    replace(torch.distributed.distributed_c10d, "all_reduce", all_reduce, parameters=parameters)


_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")


def build_on_cpu(module: ModuleType) -> None:
    """Let the name `torch` in `module` build on the CPU what its text says belongs on device='cuda'.

    Narrower than wrapping torch's own factories: `with torch.device("meta")` knows those by identity, and transformers
    would silently leave its rotary table uninitialised.
    """
    expect(getattr(module, "torch", None) is torch, f"{module.__name__}.torch", "something else", "the module torch")
    module.torch = _TorchOnCpu("torch")


class _TorchOnCpu(ModuleType):
    """The module torch, whose tensor factories read device='cuda' as the CPU."""

    def __getattr__(self, name: str):
        value = getattr(torch, name)
        return _on_cpu(value) if name in _FACTORIES else value


@functools.cache
def _on_cpu(factory):
    @functools.wraps(factory)
    def build(*args, device=None, **kwargs):
        if device == "cuda":
            device = CPU
        return factory(*args, device=device, **kwargs)

    return build
