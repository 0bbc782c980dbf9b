"""The errors that users see, and the exit-code guard around every `main`.

Exit codes: 0 done · 1 samples failed beyond the allowed share · 2 wrong use or input · 3 stopped by a safety check
(circuit breaker, silent reasoning, off-policy states, full disk; resumable) · 130 Ctrl-C, everything finished is kept.
"""

import errno
import os
import sys
from collections.abc import Callable

# OS errors caused by a path that the user gave. ENOENT is not listed because it is reported where it occurs.
USERS_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)


class UserError(Exception):
    """Wrong use or input. The message says what is wrong, where (file, line, record id) and what to do."""

    exit_code = 2


class TooManyFailures(UserError):
    """Samples failed beyond the allowed share; the finished ones are kept and a rerun tries the rest."""

    exit_code = 1


class SafetyStop(UserError):
    """A check against the target failed, or a resource ran out: continuing would store wrong data."""

    exit_code = 3


def guarded(main: Callable[[], int | None]) -> None:
    """Run `main` and exit: one line on stderr for a user's mistake, a traceback only for our own bugs."""
    try:
        code = main() or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:  # `| head` closed the pipe: print nothing more, not even at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(f"error: the disk is full ({error.filename or error}); free some space and rerun", file=sys.stderr)
            code = SafetyStop.exit_code
        elif error.filename and error.errno in USERS_PATHS:
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            code = UserError.exit_code
        else:
            raise
    except KeyboardInterrupt:
        print("interrupted: everything finished is kept; the same command resumes", file=sys.stderr)
        code = 130
    sys.exit(code)
