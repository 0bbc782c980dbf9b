"""The counter of checks that every step of the rehearsal has."""


class Checks:
    """Counts checks that passed and failed, and prints a line for each. A failed check does not end its step.

    `check(fact, holds, seen)`: `fact` is a sentence, `holds` whether it is true here, `seen` what was observed. `step`
    is the step's name in front of each line, since two steps print at the same time.
    """

    def __init__(self, step: str = ""):
        self.step = step
        self.passed = self.failed = 0

    def __call__(self, fact: str, holds: bool, seen: object = "") -> None:
        self.passed += bool(holds)
        self.failed += not holds
        self.say(f"{'ok    ' if holds else 'FAILED'} {fact}{'' if seen == '' else f'  [{seen}]'}")

    def say(self, line: str) -> None:
        print(f"{self.step:<17}{line}" if self.step else line, flush=True)
