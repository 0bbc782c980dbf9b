"""04's export as a stage writes it: model card, --export-only, the speculators layout; never two that disagree."""

import json
import re
import shlex

import pytest
import torch
from safetensors.torch import load_file

from common.export.engine_check import inspect
from common.export.findings import SGLANG, VLLM, Findings
from common.export.model_card import model_card
from common.export.speculators_layout import write_speculators
from common.pipeline.errors import UserError
from common.pipeline.manifest import Manifest
from common.pipeline.settings import Target
from common.servers.commands import sglang_command
from tests.support import tiny_training
from tests.support.drafts import write_draft
from tests.support.stages import only_error

FLAGS = ("--eval-every", 1)
KEEP = {"common.training.checkpoint.KEEP_CHECKPOINTS": 99}
CARD_FACTS = {"chosen_step": 7, "baselines": {}, "draft": {}, "data": {}, "train": {"x": "a|b"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory, demo_target):
    """A trained run that this file's tests export from again and again."""
    folder = tiny_training.build(tmp_path_factory.mktemp("export") / "run")
    code, _, err = train(folder)
    assert code == 0, err
    return folder


def train(folder, *flags) -> tuple[int, str, str]:
    return tiny_training.train(folder, *FLAGS, *flags, constants=KEEP)


def head(folder) -> torch.Tensor:
    return load_file(folder / "04_draft/export/model.safetensors")["lm_head.weight"]


def checkpoint(run, at: int):
    return sorted((run / "04_draft/checkpoints").glob("step-*"))[at]


def sound(run) -> None:
    """The folder is what its manifest says, and would be served."""
    manifest = Manifest.load(run / "04_draft", "04_draft")
    assert manifest.verify(run / "04_draft") == [] and manifest.complete
    assert inspect(run / "04_draft/export").faults() == []


def test_the_card_says_what_was_measured_and_how_to_serve(run):
    card = (run / "04_draft/export/README.md").read_text()
    figures = Manifest.load(run / "04_draft", "04_draft").counts
    for k, entry in figures["acceptance"]["walk"].items():
        floors = [figures["baselines"][name]["walk"][k]["length"] for name in ("bigram", "untrained")]
        assert re.search(rf"\| {k} \| \*\*{entry['length']:.3f}\*\* \|.*\| {floors[0]:.3f} \| {floors[1]:.3f} \|", card)
    served = str(run / "04_draft/export")
    words = shlex.split(re.search(r"```bash\n(vllm serve.*?)```", card, re.DOTALL)[1].replace("\\\n", " "))
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative == {"method": "eagle3", "model": served, "num_speculative_tokens": 3}
    train_rows = Manifest.load(run / "03_dataset", "03_dataset").counts["train"]
    assert "--serve-eval" in card and "| learning_rate | 0.02 |" in card and f"| train | {train_rows} |" in card
    assert "export/README.md" in Manifest.load(run / "04_draft", "04_draft").files
    sound(run)


def test_a_card_for_the_hub_without_figures():
    target = Target("some/target", reasoning_parser="kimi_k2", tensor_parallel=8, server_flags=("--trust-remote-code",))
    card = model_card(target, "draft", CARD_FACTS, {"walk": {}}, 3, Findings())
    assert card.startswith("---\nbase_model: some/target\n") and "Not measured" in card and "a\\|b" in card
    command = sglang_command(target, 8000, "draft", 3).replace("\\\n", " ")
    assert "--tp-size 8" in command and "--speculative-num-draft-tokens 4" in command
    assert "--trust-remote-code" in command and "--reasoning-parser kimi_k2" in command


def test_the_card_commands_only_engines_that_serve_the_draft(run):
    """Whatever the defaults are: of this run, and of what either engine would be found to lack."""
    findings = inspect(run / "04_draft/export")
    assert printed((run / "04_draft/export/README.md").read_text()) == findings.servable() == [VLLM, SGLANG]
    for lacking in ([], [SGLANG], [VLLM, SGLANG]):
        findings = Findings()
        for engine in lacking:
            findings.error(engine, f"{engine} reads no such thing")
        card = model_card(Target("some/target"), "draft", CARD_FACTS, {"walk": {}}, 3, findings)
        assert printed(card) == findings.servable()
        assert all(
            f"It would not serve the draft as it was trained: {engine} reads no such thing." in card
            for engine in lacking
        )


def printed(card: str) -> list[str]:
    """The engines that the card has a command for."""
    return [name for name, words in ((VLLM, "vllm serve "), (SGLANG, "sglang.launch_server")) if words in card]


@pytest.mark.parametrize("form", ["llama", "mla"])
def test_a_draft_of_a_yarn_target_is_served_by_both(tmp_path, form):
    """Kimi's own scaling, whose factor SGLang would make 1.42 without a word."""
    scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    scaling |= {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert inspect(write_draft(tmp_path / "e", form=form, rope_scaling=scaling)).servable() == [VLLM, SGLANG]


def test_export_only(run):
    best = head(run)
    code, out, err = train(run, "--export-only", checkpoint(run, -1))
    assert code == 0, err
    assert not torch.equal(head(run), best)
    assert torch.equal(head(run), load_file(checkpoint(run, -1) / "model.safetensors")["lm_head.weight"].bfloat16())
    step = json.loads((checkpoint(run, -1) / "state.json").read_text())["step"]
    assert (
        f"at step {step}," in out and f"checkpoint of step {step}." in (run / "04_draft/export/README.md").read_text()
    )
    sound(run)
    assert train(run)[0] == 0 and torch.equal(head(run), best)  # the plain command serves the best again
    sound(run)


def test_export_only_of_what_is_none_of_this_run(run, tmp_path):
    for wrong in (tmp_path, run / "04_draft/export", run / "04_draft/checkpoints"):
        code, _, err = train(run, "--export-only", wrong)
        assert code == 2 and f"no checkpoint of {run}/04_draft, which has step-" in only_error(err)
    code, _, err = train(run, "--export-only", checkpoint(run, 0), "--fresh")
    assert code == 2 and "contradict" in only_error(err)
    code, _, err = train(run, "--export-only", checkpoint(run, 0), "--learning-rate", 0.5)
    assert code == 2 and "train.learning_rate: 0.02 there, 0.5 now" in only_error(err)
    sound(run)


def test_the_speculators_layout_beside_it(run):
    assert not (run / "04_draft/export-speculators").exists()
    code, _, err = train(run, "--export-format", "speculators")
    assert code == 0, err

    def same() -> bool:
        ours, other = (
            load_file(run / f"04_draft/{name}/model.safetensors") for name in ("export", "export-speculators")
        )
        renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in ours.items()}
        return renamed.keys() == other.keys() and all(torch.equal(tensor, other[n]) for n, tensor in renamed.items())

    assert same() and "export-speculators/config.json" in Manifest.load(run / "04_draft", "04_draft").files
    assert train(run, "--export-only", checkpoint(run, 0))[0] == 0 and same()  # follows the other export
    sound(run)


def test_the_speculators_config(tmp_path):
    """The keys that speculators 0.9 and vLLM 0.32 read (both loaded such a folder)."""
    options = {
        "norm_before_fc": True,
        "norm_output": True,
        "rope_theta": 5e4,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    write_speculators(tmp_path / "s", write_draft(tmp_path / "e", **options), "some/target", 3)
    config = json.loads((tmp_path / "s/config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 6
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 9]  # inputs of layers, as vLLM counts
    assert (config["norm_before_fc"], config["norm_output"], config["norm_before_residual"]) == (True, True, False)
    nested = config["speculators_config"]
    assert nested["verifier"]["name_or_path"] == "some/target" and nested["default_proposal_method"] == "greedy"
    assert nested["proposal_methods"][0] | {"speculative_tokens": 3} == nested["proposal_methods"][0]
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == ("llama", 12, 1)
    assert layer["rope_parameters"] == {"type": "linear", "rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}


def test_what_the_speculators_layout_has_no_place_for(tmp_path):
    with pytest.raises(UserError, match="no MLA draft"):
        write_speculators(tmp_path / "s", write_draft(tmp_path / "e", form="mla"), "some/target", 3)
    assert not (tmp_path / "s").exists()
