"""The target's sizes and its three tensors out of checkpoints in the forms that exist, and refusals of the others."""

import json

import pytest
import torch
from safetensors.torch import save_file

from common.pipeline.errors import UserError
from common.pipeline.settings import Target
from common.target.sizes import read_sizes, target_digest
from common.target.tensors import read_tensors

V, H, N = 20, 8, 12
CONFIG = {"hidden_size": H, "num_hidden_layers": N, "vocab_size": V, "rms_norm_eps": 1e-6}
NORM, HEAD, EMBEDDING = torch.rand(H) + 1, torch.randn(V, H), torch.randn(V, H)
ROLES = ("norm", "lm_head", "embedding")


def tensors(prefix="", head="", **changed) -> dict:
    """A checkpoint's tensors, with others around that look alike."""
    found = {
        f"{prefix}model.norm.weight": NORM,
        f"{head or prefix}lm_head.weight": HEAD,
        f"{prefix}model.embed_tokens.weight": EMBEDDING,
        f"{prefix}model.layers.0.input_layernorm.weight": torch.zeros(H),
        f"{prefix}model.layers.0.self_attn.q_norm.weight": torch.zeros(H),
        f"{prefix}model.layers.11.mlp.down_proj.weight": torch.zeros(H, H),
        # the target's own MTP layer and a vision tower, as DeepSeek and Kimi have them
        f"{prefix}model.layers.12.embed_tokens.weight": torch.zeros(V, H),
        f"{prefix}model.layers.12.shared_head.norm.weight": torch.zeros(H),
        "vision_tower.encoder.final_layernorm.weight": torch.zeros(H),
        "mm_projector.norm.weight": torch.zeros(H),
        "multi_modal_projector.norm.weight": torch.zeros(H),  # Mistral-Small-3's
    }
    for name, tensor in changed.items():
        name = next(key for key in found if key.endswith(f"{name}.weight") and "layers" not in key and "mm" not in key)
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    return found


def checkpoint(folder, stored: dict, config=CONFIG, files: int = 1) -> Target:
    """A checkpoint folder; with several files, an index beside them."""
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file({name: t.contiguous().clone() for name, t in stored.items()}, folder / "model.safetensors")
        return Target(str(folder))
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {key: stored[key].clone() for key in sorted(stored)[i::files]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return Target(str(folder))


@pytest.mark.parametrize("files", [1, 4])
@pytest.mark.parametrize(
    ("prefix", "head"),
    [("", ""), ("language_model.", ""), ("model.language_model.", ""), ("model.language_model.", "x.")],
)
def test_the_three_tensors_of_every_nesting(tmp_path, prefix, head, files):
    target = checkpoint(tmp_path, tensors(prefix, head), files=files)
    found = read_tensors(target, *ROLES)
    assert torch.equal(found["norm"], NORM) and torch.equal(found["embedding"], EMBEDDING)
    assert torch.equal(found["lm_head"], HEAD)


@pytest.mark.parametrize("files", [1, 3])
def test_quantised_weights_with_a_plain_head_as_kimi_has_them(tmp_path, files):
    """Kimi-K2.5's names and nesting: packed INT4 experts, everything that training reads in bf16."""
    expert = "language_model.model.layers.1.mlp.experts.0.down_proj"
    packed = {
        f"{expert}.weight_packed": torch.zeros(H, 1, dtype=torch.int32),
        f"{expert}.weight_scale": torch.ones(H, 1).bfloat16(),
        f"{expert}.weight_shape": torch.tensor([H, H]),
        "language_model.model.layers.0.self_attn.kv_a_layernorm.weight": torch.zeros(4),
    }
    plain = {name: tensor.bfloat16() for name, tensor in tensors("language_model.").items()}
    text = CONFIG | {"quantization_config": {"quant_method": "compressed-tensors"}}
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    found = read_tensors(checkpoint(tmp_path, plain | packed, config, files), *ROLES)
    assert torch.equal(found["lm_head"], HEAD.bfloat16()) and torch.equal(found["norm"], NORM.bfloat16())


def test_several_index_files_and_none(tmp_path):
    """Text and vision indexed apart; then files without any index."""
    target = checkpoint(tmp_path, tensors("language_model."), files=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    text = {name: file for name, file in index.items() if name.startswith("language_model.")}
    (tmp_path / "model.safetensors.index.json").unlink()
    for name, part in (("text", text), ("vision", {n: f for n, f in index.items() if n not in text})):
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": part}))
    assert torch.equal(read_tensors(target, "lm_head")["lm_head"], HEAD)
    for path in tmp_path.glob("*.index.json"):
        path.unlink()
    assert torch.equal(read_tensors(target, "norm")["norm"], NORM)


@pytest.mark.parametrize("names", [("tok_embeddings", "output", "norm"), ("wte", "embed_out", "ln_f")])
def test_other_families_names(tmp_path, names):
    stored = dict(zip((f"transformer.{name}.weight" for name in names), (EMBEDDING, HEAD, NORM), strict=True))
    found = read_tensors(checkpoint(tmp_path, stored), *ROLES)
    assert [torch.equal(found[role], want) for role, want in zip(ROLES, (NORM, HEAD, EMBEDDING), strict=True)]


def test_what_was_tried_is_said(tmp_path):
    target = checkpoint(tmp_path, tensors(lm_head=None) | {"language_head.weight": HEAD})
    with pytest.raises(UserError, match=r"none of 11 names ends like \*\.lm_head\.weight, .*; similar: language_head"):
        read_tensors(target, "lm_head")


def test_a_shipped_config_is_asserted_or_used(tmp_path):
    shipped = tmp_path / "some.config.json"
    text = {"hidden_size": H, "num_hidden_layers": N, "vocab_size": V, "rms_norm_eps": 1e-6, "head_dim": 4}
    shipped.write_text(json.dumps({"model_type": "x", "text_config": text}))
    target = checkpoint(tmp_path, tensors())
    assert read_sizes(target, shipped) == read_sizes(target)
    absent = read_sizes(Target(str(tmp_path / "none")), shipped)
    assert (absent.hidden_size, absent.layers, absent.vocab_size, absent.eps) == (H, N, V, 1e-6)
    shipped.write_text(json.dumps(text | {"vocab_size": 7}))
    with pytest.raises(UserError, match=r"vocab_size is 7 in .*some\.config\.json, 20 in config\.json"):
        read_sizes(target, shipped)
    shipped.write_text(json.dumps({"hidden_size": H}))
    with pytest.raises(UserError, match="has no 'num_hidden_layers'"):
        read_sizes(Target(str(tmp_path / "none")), shipped)
    with pytest.raises(UserError, match="no such folder"):
        read_sizes(Target(str(tmp_path / "none")))


def test_transformers_own_nesting(tmp_path):
    """`model.language_model.norm`, the head at the top: what AutoModelForImageTextToText saves."""
    stored = {"model.language_model.norm.weight": NORM, "lm_head.weight": HEAD}
    target = checkpoint(tmp_path, stored | {"model.language_model.embed_tokens.weight": EMBEDDING})
    assert torch.equal(read_tensors(target, "norm")["norm"], NORM)


@pytest.mark.parametrize("nested", [False, True])
def test_a_tied_head_is_the_embedding(tmp_path, nested):
    tied = CONFIG | {"tie_word_embeddings": True}
    target = checkpoint(tmp_path, tensors(lm_head=None), {"text_config": tied} if nested else tied)
    assert torch.equal(read_tensors(target, "lm_head")["lm_head"], EMBEDDING)
    assert read_sizes(target).tied


def test_rows_beyond_the_vocabulary_are_padding(tmp_path):
    padded = torch.cat([HEAD, torch.full((4, H), 9.0)])
    assert torch.equal(read_tensors(checkpoint(tmp_path, tensors(lm_head=padded)), "lm_head")["lm_head"], HEAD)


@pytest.mark.parametrize(
    ("changed", "role", "said"),
    [
        ({"lm_head": None}, "lm_head", "the lm_head of .* is not clear"),
        ({"model.norm": None}, "norm", "the norm of .* is not clear"),
        ({"lm_head": torch.zeros(V, H, dtype=torch.int8)}, "lm_head", "quantised"),
        ({"lm_head": torch.zeros(V, H // 8, dtype=torch.int32)}, "lm_head", "quantised"),
        ({"lm_head": torch.zeros(V, H, dtype=torch.float8_e4m3fn)}, "lm_head", "quantised"),
        ({"lm_head": HEAD[:-1]}, "lm_head", r"shape \[19, 8\], expected \[20, 8\]"),
        ({"lm_head": HEAD[:, :4]}, "lm_head", r"shape \[20, 4\]"),
        ({"model.norm": torch.ones(H, 1)}, "norm", "shape"),
        ({"model.norm": torch.ones(H + 1)}, "norm", "shape"),
    ],
)
def test_a_tensor_that_training_cannot_use_is_refused(tmp_path, changed, role, said):
    with pytest.raises(UserError, match=said):
        read_tensors(checkpoint(tmp_path, tensors(**changed)), role)


@pytest.mark.parametrize(("bias", "role"), [("model.norm.bias", "norm"), ("lm_head.bias", "lm_head")])
def test_a_bias_is_refused_by_name(tmp_path, bias, role):
    target = checkpoint(tmp_path, tensors() | {bias: torch.zeros(H)})
    with pytest.raises(UserError, match=bias.replace(".", r"\.")):
        read_tensors(target, role)
    assert set(read_tensors(target, "embedding")) == {"embedding"}


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logits_soft_cap"])
@pytest.mark.parametrize("nested", [False, True])
def test_capped_logits_are_refused_by_name(tmp_path, key, nested):
    for cap in (30.0, None):
        config = CONFIG | {key: cap}
        target = checkpoint(tmp_path, tensors(), {"text_config": config} if nested else config)
        if cap:
            with pytest.raises(UserError, match=f"{key} is 30.0 in its config.json"):
                read_sizes(target)
    assert read_sizes(target).vocab_size == V


def test_two_candidates_are_named(tmp_path):
    target = checkpoint(tmp_path, tensors() | {"second_model.model.norm.weight": NORM})
    with pytest.raises(UserError, match=r"several tensors match: model\.norm.*, second_model\.model\.norm"):
        read_tensors(target, "norm")


def test_a_quantised_head_of_another_name_is_not_found_rather_than_guessed(tmp_path):
    stored = tensors(lm_head=None) | {"lm_head.weight_packed": torch.zeros(V, 1, dtype=torch.int32)}
    with pytest.raises(UserError, match=r"the lm_head of .* is not clear"):
        read_tensors(checkpoint(tmp_path, stored), "lm_head")


def test_sizes_of_nested_and_flat_configs(tmp_path):
    flat = read_sizes(checkpoint(tmp_path, {}, CONFIG))
    nested = read_sizes(checkpoint(tmp_path, {}, {"model_type": "kimi_k25", "vocab_size": 5, "text_config": CONFIG}))
    for sizes in (flat, nested):
        assert (sizes.hidden_size, sizes.layers, sizes.vocab_size, sizes.eps, sizes.tied) == (H, N, V, 1e-6, False)


def test_aux_layers(tmp_path):
    sizes = read_sizes(checkpoint(tmp_path, {}))
    assert sizes.aux_layers(()) == (2, 6, 9) and sizes.aux_layers((0, 11)) == (0, 11)
    for wrong in [(2, 2, 9), (9, 2), (2, 12), (-1, 3)]:
        with pytest.raises(UserError, match=r"must rise and lie in 0\.\.11"):
            sizes.aux_layers(wrong)
    kimi = read_sizes(checkpoint(tmp_path, {}, CONFIG | {"num_hidden_layers": 61}))
    assert kimi.aux_layers(()) == (2, 30, 58)


def test_the_digest_changes_with_config_and_weights(tmp_path):
    first = target_digest(checkpoint(tmp_path, tensors()))
    assert target_digest(Target(str(tmp_path))) == first
    assert target_digest(checkpoint(tmp_path, tensors(), CONFIG | {"rope_theta": 5})) != first
    assert target_digest(checkpoint(tmp_path, tensors(lm_head=None))) != first


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"hidden_size": 8,'), "not JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"hidden_size": 8}'), "num_hidden_layers"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"half"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "weight_map"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "not JSON"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"lm_head.weight": "model-7.safetensors"}}'
            ),
            "no model-7.safetensors",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, break_it, said):
    target = checkpoint(tmp_path, tensors())
    break_it(tmp_path)
    with pytest.raises(UserError, match=said) as caught:
        read_tensors(target, "lm_head")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["", "./nowhere", "/nowhere/at/all", "runs/nowhere-at-all"])
def test_a_folder_that_is_not_there_is_no_hub_name(root_folder, model):
    with pytest.raises(UserError, match=r"empty|no such folder"):
        read_sizes(Target(model))
