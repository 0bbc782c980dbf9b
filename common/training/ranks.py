"""Training on several ranks with DDP or FSDP2, and the stop signal that all of them obey together.

DDP keeps all tensors on every rank. FSDP2 shards the trained float32 weights, their gradients and the optimizer's
state; every step reads the frozen embedding and the target's head, so each rank keeps them unsharded.
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
    """This process among those that torchrun started; rank 0 of 1 without torchrun."""

    rank: int
    world: int
    device: str

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Block until every rank has called this."""
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
        """This rank's entries of a list: every world-th, starting at its number. `collect` joins them again."""
        return items[self.rank :: self.world]

    def collect(self, results: list) -> list:
        """The results of all ranks for their entries, in the order of the whole list (small Python objects)."""
        if self.world == 1:
            return results
        by_rank: list = [None] * self.world
        dist.all_gather_object(by_rank, results)
        return [by_rank[i % self.world][i // self.world] for i in range(sum(map(len, by_rank)))]


def start_ranks(device: str) -> Ranks:
    """Join the process group when torchrun started this process; nccl on GPUs, gloo on CPUs."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if "RANK" not in os.environ:
        return Ranks(0, 1, device)
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def wrap_for_ranks(module: nn.Module, kind: str, ranks: Ranks) -> nn.Module:
    """`module` wrapped by DDP or FSDP2 (`kind`: "ddp" or "fsdp"). Gradients are means over the ranks."""
    if ranks.world == 1:
        return module
    if kind == "ddp":
        # The buffers (the target's head and norm) are large and constant: do not send them at every forward.
        ddp = nn.parallel.DistributedDataParallel
        renamed = "forward_sync_buffers" in inspect.signature(ddp).parameters  # since torch 2.13
        return ddp(module, **{"forward_sync_buffers" if renamed else "broadcast_buffers": False})
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    frozen = {p for p in module.parameters() if not p.requires_grad}
    mesh = init_device_mesh(torch.device(ranks.device).type, (ranks.world,))
    # One unit that stays unsharded until its backward has run: every unrolled step reads every weight.
    return fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards this module's weights."""
    return hasattr(module, "set_requires_gradient_sync")


def set_gradient_sync(module: nn.Module, on: bool) -> None:
    """Whether ranks exchange gradients in the next backward: a step needs it at its last pack only."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = on
    elif is_sharded(module):
        module.set_requires_gradient_sync(on)


@contextmanager
def unsharded(module: nn.Module):
    """Gather the weights once for all forwards inside, of which ranks may have different numbers."""
    if is_sharded(module):
        module.unshard()
    yield
    if is_sharded(module):
        module.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks, which must all call this; an unsharded tensor is returned unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A full tensor, the same on all ranks, with `parameter`'s device, dtype and sharding."""
    tensor = tensor.to(parameter.device, parameter.dtype)
    if not hasattr(parameter, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


class StopSignal:
    """SIGTERM and the first Ctrl-C make the loop checkpoint and stop; a second Ctrl-C stops at once."""

    def __init__(self, ranks: Ranks):
        self.asked_here, self.ranks = False, ranks
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number, frame) -> None:
        self.asked_here = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def asked(self) -> bool:
        """Whether any rank received the signal; the same answer on every rank."""
        return bool(self.ranks.sum(torch.tensor(int(self.asked_here))))
