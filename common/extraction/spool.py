"""The folder where extraction servers write states, and from which stage 02 reads and deletes them.

The server answers a request with a path *before* it has written the file, and holds an exclusive flock on PATH.lock
while it writes. Whoever gets the lock shared finds the whole file. A crash can leave a held or a free lock without one.

The server puts the name that we give a request into its file's name. So after a deadline or a lost connection, a file
that arrives late is still found and deleted. Each run holds a flock on `.RUN.alive`: files of a run whose flock is free
are deleted by the next run.
"""

import fcntl
import functools
import itertools
import re
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from common.extraction.extractor import ExtractError

PREFIX = "kimi-eagle3-"
RUN = re.compile(PREFIX + "[0-9a-f]{8}")
POLL_S = (0.002, 0.016)  # first and longest pause between two looks at a lock and its file; a look takes 20 us
FILE_GRACE_S = 2.0  # how much later than its free lock a file may appear in a slow shared folder
TEMPORARY_S = 60.0  # safetensors writes `.tmpXXXXXX` and renames it; one not written to for this long is abandoned


class Spool:
    """One run's files in a folder that several runs and servers may share."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = PREFIX + secrets.token_hex(4)
        self.alive = open(self._alive(self.run), "wb")  # noqa: SIM115 - held open as long as the run lives
        fcntl.flock(self.alive, fcntl.LOCK_EX)
        self.numbers, self.abandoned, self.stopped = itertools.count(), set(), threading.Event()
        self.sweep()

    def _alive(self, run: str) -> Path:
        return self.folder / f".{run}.alive"

    def new_request(self) -> str:
        """A name that no other request has, for the X-Request-Id header."""
        return f"{self.run}-{next(self.numbers)}-"

    def wait(self, path: Path, deadline: float) -> BinaryIO:
        """The lock file of `path`, held shared, once the file is written; raises ExtractError when it will not be."""
        lock, pause, free_since = path.with_name(path.name + ".lock"), POLL_S[0], None
        while True:
            file = _take_shared(lock)
            if file and path.exists():
                return file
            if file:
                file.close()
                free_since = free_since or time.monotonic()
                if time.monotonic() - free_since > FILE_GRACE_S:
                    raise ExtractError(f"{lock.name} is free but its file is missing: the server died while writing")
            else:
                free_since = None
            if time.monotonic() > deadline:
                state = "is still held" if lock.exists() else "never appeared"
                raise ExtractError(f"{lock.name} {state} at the deadline")
            if self.stopped.wait(pause):
                raise ExtractError("the run was stopped")
            pause = min(2 * pause, POLL_S[1])

    def clean(self, request: str, path: Path | None, abandoned: bool) -> None:
        """Delete what a request left. `abandoned`: more of it may still arrive, so look again later."""
        if path:
            path.unlink(missing_ok=True)
            path.with_name(path.name + ".lock").unlink(missing_ok=True)
        if abandoned:
            self.abandoned.add(request)
        if self.abandoned:
            self._delete(lambda name: any(late in name for late in list(self.abandoned)))

    def sweep(self) -> None:
        """Delete the files that runs and servers left when they died."""
        is_alive = functools.cache(self._is_alive)

        def dead(name: str) -> bool:
            if name.startswith(".tmp"):
                with suppress(FileNotFoundError):
                    return time.time() - (self.folder / name).stat().st_mtime > TEMPORARY_S
            run = RUN.search(name)
            return run is not None and not is_alive(run.group())

        self._delete(dead)

    def _is_alive(self, run: str) -> bool:
        lock = self._alive(run)
        file = _take_shared(lock)
        if file:
            file.close()
        return file is None and lock.exists()

    def close(self) -> None:
        """End waiting threads and delete all files of this run."""
        self.stopped.set()
        self._delete(lambda name: self.run in name)
        self.alive.close()
        self.sweep()

    def _delete(self, wanted) -> None:
        for path in list(self.folder.iterdir()):
            if wanted(path.name):
                path.unlink(missing_ok=True)


def _take_shared(lock: Path) -> BinaryIO | None:
    """The open lock file, or None while it is held or missing."""
    try:
        file = open(lock, "rb")  # noqa: SIM115 - handed to the caller
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
