"""The documents: the rehearsal runs every command or the table says why not, and our code prints every message in them.

tests/end_to_end/documents.py says how each command runs. Here its tables are compared with the documents, both ways.
"""

import re
import shlex

import pytest

from common.pipeline import command_line
from common.pipeline.command_line import load_settings
from common.servers.commands import draft_command
from tests.end_to_end import documents
from tests.end_to_end.documents import CONFIGS, EXEMPT, PROGRAMS, PROMISES, README, RUNBOOK, TOGETHER
from tests.support.stages import ROOT, SCRIPTS, script_module

DOCUMENTS = (README, RUNBOOK, CONFIGS)
PORTS = {"draft_port": 1, "rendezvous_port": 2, "generation_port": 3, "extraction_port": 4}
FOREIGN = {
    "--port",
    "--max-model-len",
    "--reasoning-parser",
    "--nproc-per-node",
    "--shm-size",
}  # of vLLM, torchrun, Docker
RANKS = 2  # what the rehearsal's machine has room for

ALL = [(document, command) for document in DOCUMENTS for block in documents.blocks(document)
       for command in block.commands]  # fmt: skip
COMMANDS = list(dict.fromkeys(command for _, command in ALL))
INLINE = [command for document in DOCUMENTS for command in documents.inline_commands(document)]


class Parsed(Exception):
    """Raised in place of what the script would do."""


def parse(stage: str, argv: list[str]):
    """The settings that the script's own parser returns; the script ends there."""
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


def script_of(words: list[str]) -> int | None:
    """Index of the script among a command's words; None if it runs none."""
    return next((i for i, word in enumerate(words) if word.endswith(".py")), None)


@pytest.mark.parametrize(("document", "command"), ALL, ids=[command[:70] for _, command in ALL])
def test_every_command_is_accepted(document, command, root_folder):
    """By the script's own parser; `make` has the target; a command that nothing runs has its reason in EXEMPT."""
    words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", command))  # without variables in front of it
    at = script_of(words)
    if at is not None:
        assert words[0] in ("python", "torchrun") and (ROOT / words[at]) in SCRIPTS.values(), command
        assert parse(words[at][:2], words[at + 1 :]).target.model
        assert documents.exempt(command) or documents.promised(command), (
            f"{command}: say in PROMISES what it must print"
        )
    elif words[0] == "make":
        assert set(words[1:]) <= make_targets()
    as_run = shlex.split(documents.as_run(command, **PORTS))
    assert documents.exempt(command) or as_run[0] in PROGRAMS, f"{words[0]}: put it into EXEMPT or PROGRAMS"
    if as_run[0] == "torchrun":
        nodes = int(as_run[as_run.index("--nnodes") + 1]) if "--nnodes" in as_run else 1
        assert nodes * int(as_run[as_run.index("--nproc-per-node") + 1]) == RANKS, "cut its ranks in REWRITES"


@pytest.mark.parametrize("command", INLINE)
def test_a_command_in_the_running_text_is_one_that_runs(command):
    assert command in COMMANDS or documents.exempt(command)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_block_of_commands_is_overlooked(document):
    """A fence of another name, or an indented one, would hide its commands from the rehearsal."""
    text = (ROOT / document).read_text("utf-8")
    named = re.findall(r"^ *```(\S+)", text, re.MULTILINE)
    assert set(named) <= {"bash", "mermaid"} and named.count("bash") == len(list(documents.blocks(document)))
    sections = set(re.findall(r"^## (.+)$", text, re.MULTILINE))
    assert document != RUNBOOK or set(documents.FRESH) <= sections


def test_no_entry_of_the_tables_is_stale(monkeypatch):
    for pattern in EXEMPT:
        assert any(re.fullmatch(pattern, command) for command in COMMANDS + INLINE), pattern
    for pattern, _ in PROMISES:
        assert any(re.search(pattern, command) for command in COMMANDS if not documents.exempt(command)), pattern
    run = {command: documents.as_run(command, **PORTS) for command in COMMANDS if not documents.exempt(command)}
    assert {shlex.split(command)[0] for command in run.values()} == PROGRAMS
    for row in documents.REWRITES:
        others = [other for other in documents.REWRITES if other is not row]
        with monkeypatch.context() as without:
            without.setattr(documents, "REWRITES", others)
            assert any(documents.as_run(command, **PORTS) != run[command] for command in run), row


def test_a_new_command_is_noticed(tmp_path, monkeypatch):
    """An unknown program is neither exempt nor run; blocks say when their commands run at the same time."""
    (tmp_path / "new.md").write_text(f"## A\n```bash\n{TOGETHER}\ncurl x \\\n  y\nmake demolish\n```\n")
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    [block] = documents.blocks("new.md")
    assert block.together and block.section == "A" and block.commands == ["curl x    y", "make demolish"]
    for command in block.commands:
        assert documents.exempt(command) is None and command.split()[0] not in PROGRAMS


def test_the_rehearsals_config_is_the_real_one_cut_in_size(tmp_path):
    config = tmp_path / "kimi-k2.5.toml"
    of_this_run = {"spool": tmp_path, "generation_port": 1, "extraction_port": 2}
    config.write_text(documents.smaller((ROOT / "configs/kimi-k2.5.toml").read_text("utf-8"), **of_this_run))
    settings = load_settings(["--config", str(config)], "a test", ("target",))  # unknown keys are errors
    assert settings.generate.max_tokens < 64
    assert settings.serving.eval_max_tokens < 64
    assert f"--local-dir {settings.target.model}" in " ".join(COMMANDS)  # where the runbook's step 0 downloads it to


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_flag_in_the_running_text_is_known(document, monkeypatch):
    known = set(FOREIGN)
    parser = command_line._parser

    def noted(*rest):
        made = parser(*rest)
        known.update(flag for action in made._actions for flag in action.option_strings)
        return made

    monkeypatch.setattr(command_line, "_parser", noted)
    for stage in SCRIPTS:
        parse(stage, ["--config", str(ROOT / "configs/kimi-k2.5.toml")])
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    used = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert used and used <= known, used - known


def test_the_served_draft_is_the_command_that_we_print(root_folder):
    target = load_settings([], "a test", ("target",)).target
    printed = draft_command(target, 8000, "runs/kimi-k2.5/04_draft/export", 3)
    shown = next(command for _, command in ALL if "eagle3" in command and command.startswith("vllm"))
    assert shlex.split(shown) == shlex.split(printed.replace("\\\n", " "))


def test_every_message_in_the_runbook_is_one_of_ours():
    """A fragment without its variable parts; vLLM's and CUDA's own are not ours to know."""
    text = (ROOT / RUNBOOK).read_text("utf-8")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")]
    sources = "\n".join(path.read_text("utf-8") for folder in (ROOT, ROOT / "common") for path in folder.rglob("*.py")
                        if ".venv" not in path.parts[len(ROOT.parts)])  # fmt: skip
    messages = [re.match(r"`([^`]+)`", row)[1] for row in rows]
    ours = [message for message in messages if "CUDA" not in message]
    assert len(ours) > 10
    for message in ours:
        assert message in sources or message == "lacks part-2-of-3", message  # printed as "lacks {names}"


def test_the_runbooks_figures_are_the_plans(tmp_path):
    from tests.support.stages import run_here

    code, out, err = run_here("02", "--run-dir", tmp_path / "none", "--n", 10000, "--dry-run")
    assert code == 0, err
    for figure in ("2,349.0 GB", "57,349 bytes", "3 checkpoints x 14.29", "39 GFLOP a token", "  5,260", "    738"):
        assert figure in out, figure
    assert re.search(r"on the GPU +51\.\d+ +39\.\d+", out)
