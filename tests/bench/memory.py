"""The memory of a training step: what common/forecast/arithmetic.py predicts beside what torch allocates.

    python tests/bench/memory.py                    several shapes on the CPU
    python tests/bench/memory.py --device cuda      Kimi-K2.5's shapes on a GPU

On the CPU the count is the profiler's ("Total Allocated" after each allocation), on CUDA max_memory_allocated.
"""

import argparse

import repository  # noqa: F401

from common.forecast.arithmetic import GIB
from tests.support.step_memory import CASES, KIMI, measured, predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    for name, case in (CASES if device == "cpu" else {"kimi": (KIMI, 8192, 0.95, 7)}).items():
        sizes, peak = predicted(*case), measured(*case, device)
        total = sum(sizes.values())
        print(f"{name:12} predicted {total / GIB:7.3f} GiB, measured {peak / GIB:7.3f} GiB, ratio {total / peak:.2f}")
        print("   " + "  ".join(f"{name} {size / GIB:.3f}" for name, size in sizes.items()))


if __name__ == "__main__":
    main()
