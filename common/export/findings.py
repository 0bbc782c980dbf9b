"""Findings on a draft's folder: what is wrong or worth knowing, and for which engine."""

from dataclasses import dataclass

VLLM, SGLANG = "vLLM", "SGLang"
ENGINES = (VLLM, SGLANG)
BOTH = "vLLM, SGLang"


@dataclass(frozen=True)
class Finding:
    """One thing that an engine would do. `level`: "error" (would not serve as trained) or "note"."""

    level: str
    engine: str  # VLLM, SGLANG or BOTH
    text: str

    def __str__(self) -> str:
        return f"{self.level:<5}  {self.engine:<12}  {self.text}"


class Findings(list):
    """What was found, in order."""

    def error(self, engine: str, text: str) -> None:
        self.append(Finding("error", engine, text))

    def note(self, engine: str, text: str) -> None:
        self.append(Finding("note", engine, text))

    def servable(self) -> list[str]:
        """The engines that would serve the draft as it was trained."""
        return [name for name in ENGINES if not self.errors(name)]

    def errors(self, engine: str) -> list[str]:
        """Why an engine would not."""
        return [f.text for f in self if f.level == "error" and engine in f.engine]
