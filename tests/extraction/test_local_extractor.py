"""States of the local extractor against the model's own hidden states and logits; what is wrong never gets stored."""

from array import array

import pytest
import torch
from torch import Tensor

from common.dataset.shard_layout import ShardKind
from common.dataset.shards import States
from common.dataset.stream import Stream
from common.extraction.local_extractor import LocalExtractor
from common.extraction.loop import assign_shards, find_fault
from common.extraction.on_policy import OnPolicy
from common.extraction.streams import RecordLocation, StreamReader
from common.pipeline.settings import Extract, Target

LAYERS, HIDDEN, DEPTH = (2, 15, 27), 576, 30
TOLERANCE = 0.04  # 30 layers of bf16 kernels that differ with the batch's size: 0.02 measured


def array_of(ids) -> array:
    return array("i", ids)


@pytest.fixture(scope="module")
def streams(tiny_run, protocol) -> list[Stream]:
    reader = StreamReader(tiny_run / "01_synthetic", protocol, 49152, 0)
    return list(reader.load(reader.locate(6)))


@pytest.fixture
def extract(smollm2, monkeypatch):
    """States by sample id, from an extractor with these settings."""
    monkeypatch.setattr("common.extraction.local_extractor.load_model", lambda *_: smollm2)

    def run(streams: list[Stream], layers=LAYERS, batch_tokens: int = 4096) -> dict[str, States]:
        extractor = LocalExtractor(Target(), Extract(batch_tokens=batch_tokens), layers)
        return {stream.id: states for stream, states in extractor.states(streams)}

    return run


@torch.inference_mode()
def own(model, stream: Stream):
    """The model's own hidden states and logits of one stream."""
    return model(torch.tensor([list(stream.ids)]), output_hidden_states=True, use_cache=False)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative error over all tokens but the first, whose huge state would hide the others."""
    found, wanted = found[1:].float(), wanted[1:].float()
    return float((found - wanted).norm() / wanted.norm())


def test_aux_states_are_the_inputs_of_their_layers(smollm2, streams, extract):
    stream = streams[0]
    states = extract([stream])[stream.id]
    theirs = own(smollm2, stream).hidden_states
    assert states.aux.shape == (len(stream), 3 * HIDDEN) and states.aux.dtype == torch.bfloat16
    for chunk, k in zip(states.aux.chunk(3, 1), LAYERS, strict=True):
        off = {at: error(chunk, theirs[at][0]) for at in (k - 1, k, k + 1)}
        assert off[k] < 1e-3 and min(off[k - 1], off[k + 1]) > 0.02, off


def test_last_state_is_before_the_norm_and_gives_the_models_own_choice(smollm2, streams, extract):
    """hidden_states[N] of transformers stands behind the norm: same name, another tensor."""
    for id, states in extract(streams).items():
        stream = next(s for s in streams if s.id == id)
        theirs = own(smollm2, stream)
        with torch.inference_mode():
            normed = smollm2.model.norm(states.last)
            choice = smollm2.lm_head(normed).argmax(-1)
        behind = theirs.hidden_states[DEPTH][0]
        assert error(normed, behind) < TOLERANCE < error(states.last, behind)
        agree = (choice == theirs.logits[0].argmax(-1)).float().mean()
        assert agree > 0.97  # bf16 ties


def test_large_norm_weights_and_another_architecture(tmp_path):
    """Case 19: a norm far from one must not hide which side of it the last state comes from."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "vocab_size": 100}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).bfloat16()
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(32) * 200)
    model.save_pretrained(tmp_path)
    stream = Stream("a", array_of(range(40)), bytearray([1] * 40))
    [(_, states)] = LocalExtractor(Target(str(tmp_path)), Extract(), (2, 4, 5), "cpu").states([stream])
    theirs = own(model.eval(), stream)
    with torch.inference_mode():
        choice = model.lm_head(model.model.norm(states.last)).argmax(-1)
    assert (choice == theirs.logits[0].argmax(-1)).float().mean() > 0.97
    for chunk, k in zip(states.aux.chunk(3, 1), (2, 4, 5), strict=True):
        off = {at: error(chunk, theirs.hidden_states[at][0]) for at in (k - 1, k, k + 1)}
        assert off[k] < 0.005 and min(off[k - 1], off[k + 1]) > 0.02, off


def test_case_17_company_and_order_change_nothing(streams, extract):
    """Alone, batched, reversed, twice, and two that share a long prefix: the same states, as many rows as ids."""
    first = streams[0]
    shared = Stream("shared", first.ids[:-5] + array_of([300, 301]), first.mask[:-5] + first.mask[-2:])
    streams = [*streams, shared]
    alone = {s.id: extract([s])[s.id] for s in streams}
    runs = [extract(streams), extract(streams[::-1]), extract(streams, batch_tokens=200)]
    for run in runs:
        assert run.keys() == alone.keys()
        for s in streams:
            assert len(run[s.id].aux) == len(run[s.id].last) == len(s)
            for name in ("aux", "last"):
                assert error(getattr(run[s.id], name), getattr(alone[s.id], name)) < TOLERANCE
    again = extract([first])[first.id]
    assert torch.equal(again.aux, alone[first.id].aux) and torch.equal(again.last, alone[first.id].last)
    prefix = len(first) - 5
    assert error(alone["shared"].last[:prefix], alone[first.id].last[:prefix]) < TOLERANCE


def test_a_stream_longer_than_a_batch_is_computed_alone(streams, extract):
    found = extract(streams, batch_tokens=16)
    assert {s.id: len(s) for s in streams} == {id: len(states.last) for id, states in found.items()}


# ---- what is wrong with states ----


KIND = ShardKind("t", "", 4, (1, 2))


def sound(tokens: int = 5) -> States:
    generator = torch.Generator().manual_seed(0)
    return States(*(torch.randn(tokens, width, generator=generator).bfloat16() for width in (8, 4)))


def spoiled(name: str, change) -> States:
    tensors = {key: tensor.clone() for key, tensor in vars(sound()).items()}
    changed = change(tensors[name])
    return States(**{**tensors, name: tensors[name] if changed is None else changed})


@pytest.mark.parametrize("name", ["aux", "last"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t[:, :-1], "expected bfloat16"),
        (lambda t: t[:-1], "expected bfloat16"),
        (lambda t: torch.cat([t, t[:1]]), "expected bfloat16"),
        (lambda t: t.float(), "torch.float32"),
        (lambda t: t[2, 1:2].fill_(float("nan")) and None, "not finite"),
        (lambda t: t[4, 3:4].fill_(float("-inf")) and None, "not finite"),
        (torch.zeros_like, "the same at every token"),
        (lambda t: t[1:2].expand(5, -1).contiguous(), "the same at every token"),
    ],
    ids=["narrow", "row lost", "row more", "float32", "nan", "inf", "zero", "constant"],
)
def test_faults_are_found(name, change, said):
    stream = Stream("a", array_of(range(5)), bytearray(5))
    problem = find_fault(stream, spoiled(name, change), KIND)
    assert problem and problem.startswith(name) and said in problem


def test_sound_states_pass():
    stream = Stream("a", array_of(range(5)), bytearray(5))
    assert find_fault(stream, sound(), KIND) is None
    one = Stream("a", array_of([3]), bytearray(1))
    assert find_fault(one, sound(1), KIND) is None  # a single token is no constant run
    large = States(sound().aux * 1e38, sound().last)
    assert find_fault(stream, large, KIND) is None  # a sum that overflows is no fault
    half = sound()
    half.aux[1:] = half.aux[1]
    assert find_fault(stream, half, KIND) is None


# ---- the on-policy check's verdict ----


def figures(**changed) -> OnPolicy:
    known = {"positions": 100, "shifted_positions": 99, "nll": 40.0, "top1": 99, "early_nll": 900.0, "late_nll": 800.0}
    return OnPolicy(**{**known, **changed})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"positions": 0}, None),
        ({"nll": 250.0}, "2.50 nat/token is above the limit of 2"),
        ({"top1": 80}, "first choice 80.0% is below 90%"),
        ({"top1": 80, "greedy": False}, None),
        ({"top1": 45, "greedy": False}, "below 50%"),
        ({"early_nll": 39.0}, "neighbouring token"),
        ({"late_nll": 39.0}, "neighbouring token"),
        ({"positions": 8, "top1": 8, "nll": 2.0, "shifted_positions": 0, "late_nll": 0.0, "early_nll": 80.0}, None),
        ({"positions": 8, "top1": 8, "nll": 8.0, "shifted_positions": 2, "late_nll": 7.0, "early_nll": 80.0}, None),
        ({"positions": 8, "top1": 7, "nll": 3.0}, None),
        ({"positions": 8, "top1": 4, "nll": 8.0}, "first choice 50.0% is below 90%"),
    ],
    ids=[
        "right",
        "empty",
        "nll",
        "greedy",
        "sampled",
        "low",
        "early",
        "late",
        "one-token replies",
        "short replies",
        "a tie among few",
        "half of few",
    ],
)
def test_verdict(changed, said):
    problem = figures(**changed).problem()
    assert problem is None if said is None else said in problem


# ---- shards ----


def test_streams_are_assigned_to_shards_in_order_and_size():
    locations = [RecordLocation(f"id{i}", None, 0, tokens) for i, tokens in enumerate([50, 60, 10, 200, 5])]
    kind = ShardKind("t", "", 4, (1, 2))
    shards = assign_shards(locations, kind, 120 * kind.bytes_per_token() / 2**30, 7)
    assert [shard.name for shard in shards] == [f"shard-0000{i}.safetensors" for i in (7, 8, 9)]
    assert [[location.tokens for location in shard.locations] for shard in shards] == [[50, 60, 10], [200], [5]]
