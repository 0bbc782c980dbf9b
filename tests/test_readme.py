"""The documents: every command in them is one that its script takes, and every message is one that the code says."""

import re
import shlex

import pytest
from stages import ROOT, SCRIPTS, script_module

from common.command_line import load_settings
from common.serving import draft_command

DOCUMENTS = ("README.md", "configs/README.md")
OTHERS = {"nvidia-smi", "df", "pip", "hf", "dd", "rsync", "vllm"}  # not ours to check


def commands(document: str) -> list[str]:
    """The lines of the document's bash blocks, continued ones joined."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text("utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


ALL = [(document, command) for document in DOCUMENTS for command in commands(document)]


class Parsed(Exception):
    """Raised in place of what the script would do."""


def parse(stage: str, argv: list[str]):
    """Settings as the script's own parser makes them; nothing of the script runs after it."""
    module = script_module(stage)

    def stop(_, *rest):
        error = Parsed()
        error.settings = load_settings(argv, *rest)
        raise error

    module.load_settings = stop
    with pytest.raises(Parsed) as caught:
        module.main()
    return caught.value.settings


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize(("document", "command"), ALL, ids=[command[:70] for _, command in ALL])
def test_every_command_is_taken(document, command, root_folder):
    words = shlex.split(command, comments=True)
    while "=" in words[0] and not words[0].startswith("-"):
        words.pop(0)
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if at is not None:
        assert words[0] in ("python", "torchrun") and (ROOT / words[at]) in SCRIPTS.values(), command
        settings = parse(words[at][:2], words[at + 1 :])
        assert settings.target.model
    elif words[0] == "make":
        assert set(words[1:]) <= make_targets()
    else:
        assert words[0] in OTHERS or (words[0] == "python" and words[1] == "-m"), command


def test_the_served_draft_is_the_command_that_we_print(root_folder):
    target = load_settings([], "a test", ("target",)).target
    printed = draft_command(target, 8000, "runs/kimi-k2.5/04_draft/export", 3)
    shown = next(command for _, command in ALL if "eagle3" in command and command.startswith("vllm"))
    assert shlex.split(shown) == shlex.split(printed.replace("\\\n", " "))


def test_every_message_in_the_runbook_is_one_of_ours():
    """A fragment without its variable parts; vLLM's and CUDA's own are not ours to know."""
    text = (ROOT / "configs/README.md").read_text("utf-8")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")]
    sources = "\n".join(path.read_text("utf-8") for folder in (ROOT, ROOT / "common") for path in folder.rglob("*.py")
                        if ".venv" not in path.parts[len(ROOT.parts)])  # fmt: skip
    messages = [re.match(r"`([^`]+)`", row)[1] for row in rows]
    ours = [message for message in messages if "CUDA" not in message]
    assert len(ours) > 10
    for message in ours:
        assert message in sources or (message == "lacks part-2-of-3" and "lacks {lost}" in sources), message


def test_the_runbooks_figures_are_the_plans(tmp_path):
    from stages import run_here

    code, out, err = run_here("02", "--run-dir", tmp_path / "none", "--n", 10000, "--dry-run")
    assert code == 0, err
    for figure in ("2,349.0 GB", "57,349 bytes", "3 checkpoints x 14.29", "39 GFLOP a token", "  5,260", "    738"):
        assert figure in out, figure
    assert re.search(r"on the GPU +51\.\d+ +39\.\d+", out)
