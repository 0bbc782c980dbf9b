"""The order of design.md's table: a file of common/ imports only files above it, and the light ones stay light."""

import ast
import subprocess
import sys

import pytest
from tests.support.stages import ROOT, SCRIPTS, run_process

# design.md's table with the files that came later, lowest first. A new file is put where it belongs, here and there.
TABLE = """
    errors config command_line progress storage parts window plan
    chat kimi_tokenizer control_tokens protocol schemas rows prompts
    engines.interface engines.reading engines.openai_server engines.local records planning generate probe
    streams preview shards target serving extractors.interface extractors.local extractors.spool
    extractors.vllm_server onpolicy extract
    vocab dataset window_extract parallel
    kernels attention draft head_loss ttt acceptance evaluation
    training window_train forecast checkpoint export findings published draft_check speculators_format model_card
    warm_start serve_metrics serve_eval
    charts page report_serving report flops live training_run
    demo_target demo
"""
ORDER = TABLE.split()
LIGHT = ("config", "storage", "protocol", "prompts", "engines.openai_server", "generate", "streams", "target")
MAX_LINES = 300


def module_name(path) -> str:
    return ".".join(path.relative_to(ROOT / "common").with_suffix("").parts)


def imported(path) -> set[str]:
    """Modules of this project that a file imports, at its head or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


COMMON = sorted(path for path in (ROOT / "common").rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", COMMON, ids=module_name)
def test_imports_only_what_stands_above_it(path):
    name = module_name(path)
    assert name in ORDER, f"common/{name} has no place in the order of imports yet"
    allowed = {f"common.{above}" for above in ORDER[: ORDER.index(name)]}
    used = {n for n in imported(path) if n.removeprefix("common.") in ORDER and n.startswith("common.")}
    assert used <= allowed, f"{name} imports from below: {sorted(used - allowed)}"


def test_the_order_names_no_file_that_is_gone():
    assert set(ORDER) == {module_name(path) for path in COMMON}
    assert len(ORDER) == len(set(ORDER))


def test_scripts_never_import_each_other():
    stems = {path.stem for path in SCRIPTS.values()}
    for path in [*SCRIPTS.values(), *COMMON]:
        text = path.read_text("utf-8")
        assert not stems & {n.split(".")[0] for n in imported(path)}, path
        assert "importlib" not in text or path.parent.name == "demo", path  # the detour round this rule


def test_no_file_is_long():
    files = [*ROOT.glob("*.py"), *(ROOT / "common").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in files}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}
    assert {name: n for name, n in lengths.items() if name.startswith("0") and n > 250} == {}


def test_package_files_are_empty():
    assert [path for path in (ROOT / "common").rglob("__init__.py") if path.read_text("utf-8").strip()] == []


def modules_after(code: str) -> set[str]:
    probe = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_light_files_import_no_torch():
    heavy = modules_after("import " + ", ".join(f"common.{name}" for name in LIGHT)) & {"torch", "transformers"}
    assert not heavy


@pytest.mark.parametrize("stage", sorted(SCRIPTS))
def test_help_answers_without_torch(stage):
    """`-X importtime` lists each module that was imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPTS[stage], "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    names = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "common" in names
    assert not names & {"torch", "transformers", "datasets", "safetensors", "openai"}
    assert "--run-dir" in done.stdout and "(default" in done.stdout


def test_help_names_units():
    assert "[tokens]" in run_process("01", "--help").stdout
