"""Shards: the same bytes in whatever order sequences come, plain safetensors for everyone else, damage is refused."""

import json
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common.dataset.shard_layout import ShardKind
from common.dataset.shards import Shard, ShardWriter, States, from_fp8, to_fp8
from common.dataset.stream import Stream
from common.pipeline.errors import UserError

HIDDEN, LAYERS = 16, (2, 5, 7)
KIND = ShardKind("some/target", "abc123", HIDDEN, LAYERS)
FP8 = ShardKind("some/target", "abc123", HIDDEN, LAYERS, "fp8")


def sample(number: int, tokens: int) -> tuple[Stream, States]:
    generator = torch.Generator().manual_seed(number)
    ids = array("i", torch.randint(0, 1000, (tokens,), generator=generator).tolist())
    mask = array("B", [i > tokens // 3 for i in range(tokens)])
    aux = torch.randn(tokens, len(LAYERS) * HIDDEN, generator=generator).bfloat16()
    last = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    return Stream(f"id{number}", ids, mask, {"question": f"q{number} ä\u2028", "finish": "stop"}), States(aux, last)


SAMPLES = [sample(number, tokens) for number, tokens in enumerate([5, 1, 9, 3])]
STREAMS = [stream for stream, _ in SAMPLES]


def write(path, order=range(4), dropped=(), kind=KIND, samples=SAMPLES):
    writer = ShardWriter(path, [stream for stream, _ in samples], kind)
    for at in order:
        stream, states = samples[at]
        writer.drop(stream.id) if at in dropped else writer.write(stream.id, states)
    assert writer.complete()
    return writer.finish()


@pytest.mark.parametrize("kind", [KIND, FP8], ids=["bf16", "fp8"])
def test_the_order_of_arrival_leaves_no_trace(tmp_path, kind):
    write(tmp_path / "a", kind=kind)
    write(tmp_path / "b", order=(2, 0, 3, 1), kind=kind)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("kind", [KIND, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("dropped", [{0}, {1, 2}, {3}])
def test_dropped_sequences_leave_no_gap(tmp_path, kind, dropped):
    """Equal to a shard that never heard of them."""
    assert write(tmp_path / "a", order=(3, 1, 0, 2), dropped=dropped, kind=kind)
    kept = [SAMPLES[at] for at in range(4) if at not in dropped]
    write(tmp_path / "b", order=range(len(kept)), kind=kind, samples=kept)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_shard_without_any_sequence_is_no_file(tmp_path):
    assert not write(tmp_path / "a", dropped=range(4))
    assert list(tmp_path.iterdir()) == []


def test_plain_safetensors_reads_it(tmp_path):
    write(tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    assert tensors["input_ids"].tolist() == [id for stream in STREAMS for id in stream.ids]
    assert tensors["loss_mask"].tolist() == [m for stream in STREAMS for m in stream.mask]
    assert tensors["offsets"].tolist() == [0, 5, 6, 15, 18]
    assert torch.equal(tensors["aux_hidden"], torch.cat([states.aux for _, states in SAMPLES]))
    assert torch.equal(tensors["last_hidden"], torch.cat([states.last for _, states in SAMPLES]))
    wanted = {"input_ids": torch.int32, "loss_mask": torch.uint8, "offsets": torch.int64}
    wanted |= {"aux_hidden": torch.bfloat16, "last_hidden": torch.bfloat16}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == wanted


def test_metadata_say_what_the_states_are(tmp_path):
    write(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
    assert [fact["id"] for fact in metadata["sequences"]] == ["id0", "id1", "id2", "id3"]
    assert metadata["sequences"][2]["question"] == "q2 ä\u2028"
    assert (metadata["target"], metadata["target_digest"], metadata["format"]) == ("some/target", "abc123", 1)
    assert (metadata["aux_layers"], metadata["hidden_size"], metadata["store_dtype"]) == ([2, 5, 7], 16, "bf16")


@pytest.mark.parametrize("kind", [KIND, FP8], ids=["bf16", "fp8"])
def test_sequences_come_back_one_by_one(tmp_path, kind):
    write(tmp_path / "a", kind=kind)
    shard = Shard(tmp_path / "a")
    assert len(shard) == 4
    for i, (stream, states) in enumerate(SAMPLES):
        ids, mask, stored = shard.sequence(i)
        assert ids.tolist() == list(stream.ids) and mask.tolist() == list(stream.mask)
        assert torch.equal(stored.last, states.last) and stored.aux.dtype == torch.bfloat16
        torch.testing.assert_close(stored.aux, states.aux, rtol=0 if kind == KIND else 0.07, atol=1e-2)
        assert torch.equal(stored.aux, states.aux) == (kind == KIND)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(-30, 30), st.sampled_from([1, 3]))
def test_fp8_round_trip_stays_within_its_bound(seed, exponent, layers):
    """e4m3 has 3 mantissa bits: half a step is 2^-4 of a value; below its normal range half a step is fixed."""
    states = torch.randn(7, layers * 32, generator=torch.Generator().manual_seed(seed)).mul(2.0**exponent).bfloat16()
    back = from_fp8(*to_fp8(states, layers))
    largest = states.float().view(7, layers, -1).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(7, -1)
    bound = (states.float().abs() * 2**-4).maximum(largest / 448 * 2**-10) * 1.01 + states.float().abs() * 2**-8
    assert (back.float() - states.float()).abs().le(bound).all()
    assert torch.equal(from_fp8(*to_fp8(torch.zeros(2, 8).bfloat16(), 2)), torch.zeros(2, 8).bfloat16())


@pytest.mark.parametrize("kind", [KIND, FP8], ids=["bf16", "fp8"])
def test_a_token_takes_the_bytes_that_the_plan_says(tmp_path, kind):
    sizes = []
    for tokens in (100, 300):
        write(tmp_path / "a", order=[0], kind=kind, samples=[sample(1, tokens)])
        sizes.append((tmp_path / "a").stat().st_size)
    assert (sizes[1] - sizes[0]) / 200 == pytest.approx(kind.bytes_per_token(), abs=0.1)  # the header grows a digit


def test_fp8_of_kimi_takes_five_eighths():
    bf16, fp8 = (ShardKind("kimi", "", 7168, (2, 30, 58), dtype).bytes_per_token() for dtype in ("bf16", "fp8"))
    assert bf16 == 57344 + 5 and 0.62 < fp8 / bf16 < 0.63


def test_an_unfinished_shard_has_no_final_name(tmp_path):
    writer = ShardWriter(tmp_path / "a", STREAMS, KIND)
    writer.write("id0", SAMPLES[0][1])
    assert not writer.complete() and not (tmp_path / "a").exists()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_shard_is_refused(tmp_path, share):
    write(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match="not a shard of this project"):
        Shard(tmp_path / "a")


def changed(tmp_path, **metadata):
    """A shard whose metadata were replaced."""
    write(tmp_path / "whole")
    with safe_open(tmp_path / "whole", "pt") as file:
        save_file(load_file(tmp_path / "whole"), tmp_path / "a", file.metadata() | metadata)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: (folder / "a").write_text("hello"),
        lambda folder: save_file({"x": torch.zeros(3)}, folder / "a"),
        lambda folder: save_file({"offsets": torch.zeros(3)}, folder / "a", {"sequences": "[]", "model": "llama"}),
        lambda folder: changed(folder, format="99"),
        lambda folder: changed(folder, sequences="[]"),
        lambda folder: changed(folder, sequences="{"),
        lambda folder: None,
    ],
    ids=["text", "other tensors", "metadata of another", "format", "facts", "half JSON", "missing"],
)
def test_a_foreign_file_is_refused(tmp_path, make):
    make(tmp_path)
    with pytest.raises(UserError, match="not a shard of this project") as caught:
        Shard(tmp_path / "a")
    assert "\n" not in str(caught.value)
