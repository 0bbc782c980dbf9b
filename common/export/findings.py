"""Findings on a draft's folder, and the engine versions whose source they were taken from."""

from dataclasses import dataclass

VLLM, SGLANG = "vLLM", "SGLang"
ENGINES = (VLLM, SGLANG)
BOTH = "vLLM, SGLang"
LEVELS = ("error", "unsupported", "note")

# The versions whose source was read for the checks. A test compares vLLM's with the one that the rehearsal installs.
CHECKED = {VLLM: "0.32", SGLANG: "0.5.23"}
# SGLang versions that lack an option which CHECKED has; which version was the first to have it is not known.
SOME_SGLANG = "some SGLang versions before 0.5.23"


@dataclass(frozen=True)
class Finding:
    """One thing that an engine would do with a draft's folder.

    `level`: "error" (the folder is wrong: the engine refuses it or serves another draft than was trained),
    "unsupported" (the folder is right, but the engine cannot compute this draft) or "note".
    """

    level: str
    engine: str  # VLLM, SGLANG or BOTH
    text: str

    def __str__(self) -> str:
        return f"{self.level:<11}  {self.engine:<12}  {self.text}"


class Findings(list):
    """All findings of one folder, in the order in which they were made."""

    def error(self, engine: str, text: str) -> None:
        self.append(Finding("error", engine, text))

    def unsupported(self, engine: str, text: str) -> None:
        self.append(Finding("unsupported", engine, text))

    def note(self, engine: str, text: str) -> None:
        self.append(Finding("note", engine, text))

    def faults(self) -> list[str]:
        """The texts of all errors; a folder without any may be published."""
        return [f.text for f in self if f.level == "error"]

    def errors(self, engine: str) -> list[str]:
        """The reasons why `engine` would not serve the draft as it was trained."""
        return [f.text for f in self if f.level != "note" and engine in f.engine]

    def servable(self) -> list[str]:
        """The engines that would serve the draft as it was trained."""
        return [name for name in ENGINES if not self.errors(name)]
