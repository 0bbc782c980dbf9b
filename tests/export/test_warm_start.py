"""Warm start from a published folder: its mapping, sizes and weights are kept; what does not fit is named."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.dataset.draft_vocabulary import mappings
from common.draft.config import DraftConfig
from common.draft.network import Draft
from common.export.engine_check import inspect
from common.export.served_config import read_draft_config
from common.export.served_folder import export
from common.export.speculators_layout import write_speculators
from common.export.warm_start import read_published, weight_hashes
from tests.support import tiny_training
from tests.support.drafts import pickle_weights, split_with_index
from tests.support.stages import only_error
from tests.support.tiny_training import exported, metrics, train

NESTED = "eagle_aux_hidden_state_layer_ids"
KEPT = torch.tensor([2, 5, 15, 16, *range(31, 51)])  # not what the tiny data would choose


@pytest.fixture
def published(tmp_path):
    """A draft of other sizes and another vocabulary than the settings would make."""
    sizes = {"hidden_size": tiny_training.HIDDEN, "intermediate_size": 40, "head_dim": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = DraftConfig("llama", **sizes, **heads, vocab_size=tiny_training.VOCAB, draft_vocab_size=len(KEPT))
    draft = Draft(config, torch.randn(tiny_training.VOCAB, tiny_training.HIDDEN).bfloat16())
    draft.initialise(None, 3, std=0.1)
    export(tmp_path / "published", draft, *mappings(KEPT, tiny_training.VOCAB), tiny_training.LAYERS, {})
    return tmp_path / "published"


def change(folder, tensors=None, **config) -> None:
    """Other tensors (None: left out) and other config values (None: left out)."""
    stored = load_file(folder / "model.safetensors") | (tensors or {})
    save_file({name: t for name, t in stored.items() if t is not None}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def test_case_24_mapping_sizes_and_weights_come_along(run, published):
    """Nothing is learned at a rate of zero: what is exported is what was published."""
    before = load_file(published / "model.safetensors")
    code, out, stderr = train(run, "--warm-start", published, "--learning-rate", 0)
    assert code == 0, stderr
    assert "24 of 64" in out and f"the draft in {published}" in out
    assert inspect(run / "04_draft/export").faults() == []
    after = exported(run)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    config = json.loads((run / "04_draft/export/config.json").read_text())
    assert (config["intermediate_size"], config["head_dim"], config["num_attention_heads"]) == (40, 6, 4)


def test_the_frozen_embedding_is_the_published_one_out_of_shards_too(run, published, monkeypatch):
    """Checkpoints hold what is trained; the draft that FSDP builds anew for the export takes the rest from there."""
    monkeypatch.setattr("common.training.trainer.is_sharded", lambda module: True)
    code, _, stderr = train(run, "--warm-start", published)
    assert code == 0, stderr
    before, after = load_file(published / "model.safetensors"), exported(run)
    assert torch.equal(after["embed_tokens.weight"], before["embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_it_learns_from_there(run, published):
    code, _, stderr = train(run, "--warm-start", published, "--epochs", 4)
    assert code == 0, stderr
    before, after = load_file(published / "model.safetensors"), exported(run)
    assert torch.equal(after["d2t"], before["d2t"]) and not torch.equal(after["fc.weight"], before["fc.weight"])
    losses = [line["loss"] for line in metrics(run, "train")]
    assert losses[-1] < losses[0]


def test_the_other_spelling_is_the_same_draft_wherever_it_lies(run, published):
    assert train(run, "--warm-start", published)[0] == 0
    first = metrics(run, "train")
    moved = published.rename(published.with_name("elsewhere"))
    code, _, stderr = train(run, "--warm-start", moved)  # the same weights: goes on, with nothing left to do
    assert code == 0, stderr
    names = load_file(moved / "model.safetensors")
    change(moved, {n: None for n in names if n.startswith("midlayer.")})
    change(moved, {n.replace("midlayer.", "layers.0."): t for n, t in names.items() if n.startswith("midlayer.")})
    code, _, stderr = train(run, "--warm-start", moved)
    assert code == 2 and "train.warm_start" in only_error(stderr)  # another file: not silently the same run
    assert train(run, "--warm-start", moved, "--fresh")[0] == 0
    assert [line["loss"] for line in metrics(run, "train")] == [line["loss"] for line in first]


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({"fc.weight": None}, {}, "fc.weight is missing"),
        ({"lm_head.weight": None}, {}, "lm_head.weight is missing"),
        ({"midlayer.mlp.extra": torch.ones(2)}, {}, "midlayer.mlp.extra is unknown"),
        ({"norm.weight": torch.full((16,), torch.nan)}, {}, "norm.weight is not finite"),
        ({"lm_head.weight": torch.ones(20, 16)}, {}, "lm_head.weight has shape [20, 16], config.json says [24, 16]"),
        ({}, {"hidden_size": 32}, "hidden_size is 32, the target's is 16"),
        ({}, {"vocab_size": 128}, "vocab_size is 128, the target's is 64"),
        ({"fc.weight": torch.ones(16, 32)}, {}, "fc.weight reads 2 aux states, the shards hold 3"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "aux layers [1, 2, 4], the shards hold [1, 2, 3]"),
        ({"d2t": KEPT}, {}, "d2t and t2d contradict each other"),
        ({}, {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {NESTED: [1, 2, 4]}}, "[1, 2, 4], in neither"),
        ({}, {"hidden_act": "gelu"}, "its config has hidden_act 'gelu', which the draft here cannot compute"),
        ({}, {"partial_rotary_factor": 0.5}, "its config has partial_rotary_factor 0.5"),
        ({}, {"architectures": ["BertModel"]}, "architectures is ['BertModel']"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(6)}, {}, "midlayer.self_attn.q_norm.weight is unknown"),
        ({}, {"hidden_size": None}, "hidden_size is None in config.json, expected a whole number"),
    ],
)
def test_what_does_not_fit_is_named(run, published, tensors, config, said):
    change(published, tensors, **config)
    code, _, stderr = train(run, "--warm-start", published)
    error = only_error(stderr)
    assert code == 2 and said in error and "train.warm_start" in error
    assert not (run / "04_draft/checkpoints").exists()


def indexed(folder) -> None:
    """Weights in two files with an index; beside them an old file and what training left."""
    old = {name: torch.zeros(1) for name in load_file(folder / "model.safetensors")}
    split_with_index(folder)
    save_file(old, folder / "model.safetensors")
    save_file(old, folder / "optimizer.safetensors")


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda folder: change(folder, architectures=["LlamaForCausalLM"]),
        lambda folder: change(folder, architectures=["Eagle3LlamaForCausalLM"]),
        lambda folder: change(folder, rms_norm_eps=None, max_position_embeddings=None),
        lambda folder: change(folder, eagle_aux_hidden_state_layer_ids=None),  # SGLang's count alone
        lambda folder: write_speculators(folder, folder, "some/target", 3),
        pickle_weights,
        indexed,
    ],
)
def test_what_the_check_reads_is_a_start_too(published, rewrite):
    sizes = read_draft_config(json.loads((published / "config.json").read_text()))
    before = read_published(str(published), sizes, tiny_training.LAYERS)
    rewrite(published)
    after = read_published(str(published), sizes, tiny_training.LAYERS)
    assert after.tensors.keys() == before.tensors.keys() and torch.equal(after.d2t, before.d2t)
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
    defaults = {"rms_norm_eps": after.config.rms_norm_eps}
    defaults |= {"max_position_embeddings": after.config.max_position_embeddings}
    assert after.config == replace(before.config, **defaults) and weight_hashes(str(published))


@pytest.mark.parametrize("length", [2048, None])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0}])
def test_the_context_length_is_the_targets(published, length, scaling):
    """An engine would stop drafting at the shorter length that a published config inherited from its class."""
    sizes = read_draft_config(json.loads((published / "config.json").read_text()))
    change(published, max_position_embeddings=length, rope_scaling=scaling, rope_parameters=None)
    start = read_published(str(published), replace(sizes, max_position_embeddings=262144), tiny_training.LAYERS)
    assert start.config.max_position_embeddings == 262144
    assert start.config.rope_scaling == scaling


def test_a_folder_without_a_draft(run, published):
    (published / "model.safetensors").unlink()
    code, _, stderr = train(run, "--warm-start", published)
    assert code == 2
    assert "published has no *.safetensors and no *.bin; name a draft's folder" in only_error(stderr)
    shutil.rmtree(published)
    code, _, stderr = train(run, "--warm-start", published)
    assert code == 2
    assert "no such file" in only_error(stderr)


# ---- further settings of the training ----


def test_the_embedding_stays_the_targets_and_the_head_is_trained(run):
    code, _, stderr = train(run, "--epochs", 1)
    assert code == 0, stderr
    vocab, head = (load_file(run / f"03_dataset/{name}.safetensors") for name in ("vocab", "target_head"))
    kept = vocab["d2t"] + torch.arange(len(vocab["d2t"]))
    assert not torch.equal(exported(run)["lm_head.weight"], head["lm_head"][kept].bfloat16())
    assert torch.equal(exported(run)["embed_tokens.weight"], head["embedding"])
    last = sorted((run / "04_draft/checkpoints").iterdir())[-1]
    assert "embed_tokens.weight" not in load_file(last / "model.safetensors")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--pack-tokens", 12), "but the longest sample of 03_dataset has 20 tokens; set --pack-tokens 20 or more"),
        (("--compare", "no-such-run"), "no-such-run has no 04_draft/metrics.jsonl"),
    ],
)
def test_settings_that_contradict_are_the_users_mistake(run, flags, said):
    code, _, stderr = train(run, *flags)
    assert code == 2 and said in only_error(stderr)
