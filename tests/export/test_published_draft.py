"""Reading a draft's folder as others publish it: names, pickles, an index, files beside the weights, damage."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.export.engine_check import inspect
from common.export.findings import SGLANG, VLLM, Findings
from common.export.published_draft import read_tensors
from common.export.speculators_layout import write_speculators
from common.pipeline.errors import UserError
from tests.support.drafts import levels, pickle_weights, renamed, split_with_index


@pytest.mark.parametrize("name", ["layers.0.", "model.midlayer.", "model.layers.0."])
def test_other_spellings(published, name):
    found = inspect(published(change_tensors=renamed(lambda n: n.replace("midlayer.", name))))
    assert found.servable() == ([SGLANG] if name.startswith("model.") else [VLLM, SGLANG])
    assert ("skip them silently" in levels(found, "note")) == ("layers.0" in name)


class Code:
    """A pickle that runs something when it is loaded."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def test_pickled_weights_are_read_without_running_them(published):
    folder = published()
    tensors = load_file(folder / "model.safetensors")
    pickle_weights(folder)
    findings = inspect(folder)
    assert findings.servable() == [VLLM, SGLANG] and "safetensors is safer" in levels(findings, "note")
    for wrong in (tensors | {"code": Code()}, [tensors], {"state": tensors}):
        torch.save(wrong, folder / "pytorch_model.bin")
        (fault,) = inspect(folder).faults()
        assert "pytorch_model.bin cannot be read: " in fault and "\n" not in fault
    (folder / "pytorch_model.bin").write_bytes(b"half")
    assert "pytorch_model.bin cannot be read" in levels(inspect(folder), "error")


def test_files_that_the_index_does_not_name_are_not_read(published):
    folder = published()
    expected = load_file(folder / "model.safetensors")
    split_with_index(folder)
    save_file({name: torch.zeros(1) for name in expected}, folder / "model.safetensors")
    findings = Findings()
    tensors = read_tensors(folder, findings)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert "model.safetensors is not read, as weights are read from model-00001" in levels(findings, "note")
    assert inspect(folder).servable() == [VLLM, SGLANG]


def test_a_tensor_is_read_from_the_file_that_the_index_names(published):
    folder = published()
    expected = load_file(folder / "model.safetensors")
    weight_map = split_with_index(folder)
    name = next(name for name, file in weight_map.items() if file.startswith("model-00001"))
    second = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {name: torch.zeros(1)}, second)
    assert torch.equal(read_tensors(folder, Findings())[name], expected[name])


def test_an_indexed_file_or_tensor_that_is_missing_is_named(published):
    folder = published()
    old = load_file(folder / "model.safetensors")
    split_with_index(folder)
    first = folder / "model-00001-of-00002.safetensors"
    stored = load_file(first)
    save_file({name: stored[name] for name in sorted(stored)[1:]}, first)
    assert f"names {min(stored)} in {first.name}, which does not hold it" in inspect(folder).faults()[0]
    first.unlink()
    save_file(old, folder / "model.safetensors")  # an old file does not fill the gap
    assert f"names {first.name}, which is missing" in inspect(folder).faults()[0]


@pytest.mark.parametrize("name", ["optimizer.safetensors", "training_args.bin", "optimizer.bin", "scheduler.bin"])
@pytest.mark.parametrize("pickled", [False, True])
def test_files_that_training_left_are_not_read(published, name, pickled):
    folder = published()
    if pickled:
        pickle_weights(folder)
    if name.endswith(".bin"):
        torch.save({"args": Code()}, folder / name)
    else:
        save_file({"fc.weight": torch.zeros(1)}, folder / name)
    findings = inspect(folder)
    assert findings.servable() == [VLLM, SGLANG]
    assert f"{name} is not read, as training left it there" in levels(findings, "note")


def test_a_half_weight_file_is_refused(published):
    file = published() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert "model.safetensors cannot be read" in inspect(file.parent).faults()[0]


def test_a_half_config_is_the_users_error(published):
    file = published() / "config.json"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"config\.json"):
        inspect(file.parent)


def test_the_speculators_layout(ours, tmp_path):
    write_speculators(tmp_path / "other", ours, "some/target", 3)
    found = inspect(tmp_path / "other")
    assert found.servable() == [VLLM] and "speculators format" in levels(found, "unsupported")
