"""The folder where extraction servers write states, and from which stage 02 reads and deletes them.

The server answers a request with a path *before* it has written the file, and holds an exclusive flock on PATH.lock
while it writes. Once the lock can be taken shared, the file is whole; only a server that crashed leaves none.

The server puts the name that we give a request into its file's name. So a file that arrives after a deadline or a lost
connection can still be deleted. Each run holds a flock on `.RUN.alive`; files of a run whose flock is free are deleted
by the next run.
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
POLL_S = (0.002, 0.016)  # first and longest pause between two checks of a lock and its file; a check takes 20 us
FILE_GRACE_S = 2.0  # in a slow shared folder, a file may appear this much later than its lock is free
TEMPORARY_S = 60.0  # safetensors writes `.tmpXXXXXX` and renames it; after this time without a write it is abandoned


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
        """The lock file of `path`, held shared, once the file is written; raises ExtractError at the deadline, or when
        the lock is free without a file."""
        lock, pause, free_since = path.with_name(path.name + ".lock"), POLL_S[0], None
        while not ((file := _take_shared(lock)) and path.exists()):
            now = time.monotonic()
            free_since = (free_since or now) if file else None
            if file:
                file.close()
                if now - free_since > FILE_GRACE_S:
                    raise ExtractError(f"{lock.name} is free but its file is missing: the server died while writing")
            if now > deadline:
                state = "is still held" if lock.exists() else "never appeared"
                raise ExtractError(f"{lock.name} {state} at the deadline")
            if self.stopped.wait(pause):
                raise ExtractError("the run was stopped")
            pause = min(2 * pause, POLL_S[1])
        return file

    def clean(self, request: str, path: Path | None, abandoned: bool) -> None:
        """Delete a request's files. `abandoned`: a file may still arrive, so later calls look for it again."""
        for file in (path, path.with_name(path.name + ".lock")) if path else ():
            file.unlink(missing_ok=True)
        if abandoned:
            self.abandoned.add(request)
        if self.abandoned:
            self._delete(lambda name: any(late in name for late in list(self.abandoned)))

    def sweep(self) -> None:
        """Delete the files that dead runs and servers left."""
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
    with suppress(FileNotFoundError):
        file = open(lock, "rb")  # noqa: SIM115 - handed to the caller
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            file.close()
    return None
