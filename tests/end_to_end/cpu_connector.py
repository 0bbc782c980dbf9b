"""vLLM's hidden-states connector, made to work without a GPU.

vLLM 0.32's `ExampleHiddenStatesConnector` answers a request with a path, holds an exclusive `flock` on PATH.lock from
the request's first forward pass on, and writes `hidden_states` [tokens, layer ids, H] and `token_ids` [tokens] to PATH
after the request has finished; closing the lock file tells the client that PATH is complete. Only the step between is
bound to CUDA: `_submit_async_write` copies the states on a second CUDA stream into pinned host memory and marks the
copy's end with a `torch.cuda.Event`. Without a GPU the pinned memory raises, in the worker, *after* the client was told
the path: the client sees a lock and never a file, the engine is dead, and every later request gets a 500.

This subclass replaces that one method. The states already lie in host memory, so indexing them is the copy, and the
event is one that has always happened. Paths, lock, file content and the writer thread remain the stock ones. Use it by
`kv_connector` "CpuHiddenStatesConnector" and `kv_connector_module_path` "tests.end_to_end.cpu_connector", the
repository's root on PYTHONPATH of the server.

`kv_connector_extra_config` takes one key more, `write_delay_s`: the writer sleeps that long under the lock before it
writes, so that a test can prove that a client waits for the lock and not for luck.
"""

import fcntl
import os
import time
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class HostCopyDone:
    """Stands in for the `torch.cuda.Event` at the end of the copy; `delay_s` makes the writer thread wait in it."""

    def __init__(self, delay_s: float):
        self.delay_s = delay_s

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        time.sleep(self.delay_s)


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: PendingSave) -> None:
        """Copy one finished request's states out of the paged cache and hand them to the writer thread."""
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        num_tokens = pending.token_ids.shape[0]
        states = extract_from_kv_cache(self._kv_cache, slots, num_tokens)  # [tokens, layer ids, H], a copy

        lock_fd = self._lock_fds.pop(pending.req_id, None)  # taken at the request's first forward pass
        if lock_fd is None and self.use_lock:
            lock_fd = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)

        done = HostCopyDone(self._kv_transfer_config.get_from_extra_config("write_delay_s", 0.0))
        states = states.to(torch.bfloat16).contiguous()  # of a server in float32, too: stage 02 takes no other type
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock_fd)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
