"""The folder in which extraction servers leave states, and from which one run of stage 02 takes and deletes them.

A request is answered with a path, *before* the file is there. The server holds an exclusive flock on PATH.lock until it
is: so the lock is taken shared, and then the file is whole. A crash can leave a held or a free lock without a file.

Every request has a name of ours, which the server puts into its file's name. So whatever becomes of a request (a
deadline, a lost connection, a file that comes too late), what it left is found and deleted. A flock on `.RUN.alive`
tells other runs, and the next one, whose files are still wanted.
"""

import fcntl
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
NAME = re.compile(PREFIX + "[0-9a-f]{8}")
POLL_S = (0.002, 0.016)  # first and longest pause between two looks at a lock or a file; a look takes 20 us
FILE_GRACE_S = 2.0  # how long a free lock may stand without its file on a slow shared folder
UNNAMED_S = 60.0  # safetensors writes `.tmpXXXXXX` and renames it: one that no writer touched for so long is dead


class Spool:
    """One run's part of a folder that several runs and servers may share."""

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
        """The lock file of `path`, held shared: the file is written. Raises ExtractError when it never will be."""
        lock, pause, free_since = path.with_name(path.name + ".lock"), POLL_S[0], None
        while True:
            file = _take_shared(lock)
            if file and path.exists():
                return file
            if file:
                file.close()
                free_since = free_since or time.monotonic()
                if time.monotonic() - free_since > FILE_GRACE_S:
                    raise ExtractError(f"{lock.name} is free and there is no file: the server died while writing")
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
        if abandoned or self.abandoned:
            if abandoned:
                self.abandoned.add(request)
            self._delete(lambda name: any(late in name for late in list(self.abandoned)))

    def sweep(self) -> None:
        """Delete what dead runs and servers left."""
        known: dict[str, bool] = {}

        def dead(name: str) -> bool:
            if name.startswith(".tmp"):
                with suppress(FileNotFoundError):
                    return time.time() - (self.folder / name).stat().st_mtime > UNNAMED_S
            found = NAME.search(name)
            if not found:
                return False
            run = found.group()
            if run not in known:
                known[run] = run != self.run and not self._lives(run)
            return known[run]

        self._delete(dead)

    def _lives(self, run: str) -> bool:
        try:
            with open(self._alive(run), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        """End waiting threads, and leave nothing of this run behind."""
        self.stopped.set()
        self._delete(lambda name: self.run in name)
        self.alive.close()
        self.sweep()

    def _delete(self, wanted) -> None:
        for path in list(self.folder.iterdir()):
            if wanted(path.name):
                path.unlink(missing_ok=True)


def _take_shared(lock: Path) -> BinaryIO | None:
    """The open lock file, or None while it is held or not there."""
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
