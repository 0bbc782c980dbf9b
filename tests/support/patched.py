"""Run a script with other values of constants: how tests reach limits that are no settings, in a process of its own.

python tests/support/patched.py common.generation.loop.RETRIES=0 01b_generate_synthetic.py --n 4
"""

import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def patched(constants: dict[str, object]) -> Iterator[None]:
    """Set module constants, given by their full names, to other values until the context ends."""
    before = []
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        before.append((owner := importlib.import_module(module), constant, getattr(owner, constant)))
        setattr(owner, constant, value)
    try:
        yield
    finally:
        for owner, constant, value in reversed(before):
            setattr(owner, constant, value)


def words(constants: dict[str, object]) -> list[str]:
    """The words between `python` and the script on a command line that sets these constants; none for no constants."""
    return [__file__, *(f"{name}={json.dumps(value)}" for name, value in constants.items())] if constants else []


if __name__ == "__main__":
    at = next(i for i, word in enumerate(sys.argv) if i and "=" not in word)
    given = dict(word.split("=", 1) for word in sys.argv[1:at])
    sys.argv = sys.argv[at:]
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    with patched({name: json.loads(value) for name, value in given.items()}):
        runpy.run_path(sys.argv[0], run_name="__main__")
