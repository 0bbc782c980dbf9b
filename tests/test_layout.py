"""The thirteen packages of common/: the direction of their imports, and files that start without torch."""

import ast
import re
import subprocess
import sys

import pytest

from tests.support.stages import ROOT, SCRIPTS, run_process

# A package imports only packages that stand before it here.
PACKAGES = (
    *("pipeline", "target", "questions", "dataset", "draft", "servers", "generation", "extraction"),
    *("export", "report", "training", "forecast", "demo"),
)
STAGES = {"generation", "extraction", "training"}  # they hand each other files, never Python objects
LIGHT = (
    *("pipeline.settings", "pipeline.files", "target.protocol", "target.sizes", "questions.questions"),
    *("generation.openai_engine", "generation.loop", "extraction.streams", "draft.config"),
)
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
def test_a_package_imports_only_packages_above_it(path):
    package = path.relative_to(ROOT / "common").parts[0]
    used = {name.split(".")[1] for name in imported(path) if name.startswith("common.")}
    assert used <= {package, *PACKAGES[: PACKAGES.index(package)]}
    assert not used & STAGES - {package} or package not in STAGES


def test_every_file_lies_in_one_of_the_packages():
    folders = {path.name for path in (ROOT / "common").iterdir() if path.name != "__pycache__"}
    assert folders == {"__init__.py", *PACKAGES}


def test_scripts_never_import_each_other():
    stems = {path.stem for path in SCRIPTS.values()}
    for path in [*SCRIPTS.values(), *COMMON]:
        text = path.read_text("utf-8")
        assert not stems & {n.split(".")[0] for n in imported(path)}, path
        assert not re.search(r"import_module|__import__|spec_from_file|exec_module", text), path  # ways round this rule


def test_test_files_import_no_test_files():
    """What two of them share lies in tests/support or in a conftest.py."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    stems = {path.stem for path in files if path.stem.startswith("test_")}
    assert {
        str(path): found for path in files if (found := stems & {n for name in imported(path) for n in name.split(".")})
    } == {}


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
