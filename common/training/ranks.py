"""One run on several ranks: who is who, DDP or FSDP2 around the unrolled step, whole tensors for files.

DDP keeps everything on every rank. FSDP2 shares out the trained float32 weights, their gradients and the optimizer's
state; the frozen embedding and the target's head are read by every step and stay whole.
"""

import inspect
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started; one of one without it."""

    rank: int
    world: int
    device: str

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on the CPU."""
        if self.world == 1:
            return values.cpu()
        values = values.to(self.device)
        dist.all_reduce(values)
        return values.cpu()

    def share(self, items: list) -> list:
        """This rank's part of a list: every world-th entry. `collect` undoes it."""
        return items[self.rank :: self.world]

    def collect(self, found: list) -> list:
        """What all ranks found for their shares, in the order of the whole list (small Python objects)."""
        if self.world == 1:
            return found
        parts: list = [None] * self.world
        dist.all_gather_object(parts, found)
        return [parts[i % self.world][i // self.world] for i in range(sum(map(len, parts)))]


def start_ranks(device: str) -> Ranks:
    """Join torchrun's process group where there is one; nccl on GPUs, gloo on CPUs."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if "RANK" not in os.environ:
        return Ranks(0, 1, device)
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def in_parallel(module: nn.Module, kind: str, ranks: Ranks) -> nn.Module:
    """`module` as all ranks train it together; `kind`: "ddp" or "fsdp". Gradients are means over the ranks."""
    if ranks.world == 1:
        return module
    if kind == "ddp":
        # The buffers are the target's head and its like: large and constant, not to be sent at every forward.
        ddp = nn.parallel.DistributedDataParallel
        renamed = "forward_sync_buffers" in inspect.signature(ddp).parameters  # since torch 2.13
        return ddp(module, **{"forward_sync_buffers" if renamed else "broadcast_buffers": False})
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    frozen = {p for p in module.parameters() if not p.requires_grad}
    mesh = init_device_mesh(torch.device(ranks.device).type, (ranks.world,))
    # One unit, gathered until its backward is over: every unrolled step reads every weight.
    return fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shares out this module's weights."""
    return hasattr(module, "set_requires_gradient_sync")


@contextmanager
def gradients(module: nn.Module, last: bool):
    """Around forward and backward of one of several packs: ranks exchange gradients at the last one only."""
    if last or (not isinstance(module, nn.parallel.DistributedDataParallel) and not is_sharded(module)):
        yield
    elif is_sharded(module):
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
    else:
        with module.no_sync():
            yield


@contextmanager
def gathered(module: nn.Module):
    """Around forwards without backward, however many each rank has: the weights are put together once."""
    if not is_sharded(module):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all ranks: every rank has to ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor in the device, type and share of `parameter`; every rank has the same one, so nothing is sent."""
    tensor = tensor.to(parameter.device, parameter.dtype)
    if not hasattr(parameter, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


class StopSignal:
    """SIGTERM and the first Ctrl-C ask the loop to checkpoint and stop; a second Ctrl-C stops at once."""

    def __init__(self, ranks: Ranks):
        self.asked_here, self.ranks = False, ranks
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number, frame) -> None:
        self.asked_here = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def asked(self) -> bool:
        """Whether any rank was asked, the same answer on every rank."""
        if self.ranks.world == 1:
            return self.asked_here
        return bool(self.ranks.sum(torch.tensor([int(self.asked_here)])))
