"""Stage 02 as a whole: deliberate faults stop it, a kill or a damaged shard costs only what was lost."""

import json
import shutil
import subprocess
import time

import pytest
import torch

from common.dataset.shards import Shard, States
from common.extraction.local_extractor import LocalExtractor
from common.pipeline.manifest import Manifest
from common.pipeline.settings import Extract, Target
from tests.support.stages import DEMO, ROOT, command, only_error, run_here

LAYERS = (2, 15, 27)
FEW_A_SHARD = ("--shard-gib", 200 * 4613 / 2**30)  # two or three samples a shard, five shards in all


@pytest.fixture
def extract(smollm2, monkeypatch):
    """Runs 02 in this process: (exit code, stdout, stderr). `fault` changes each stream's states before they arrive."""
    monkeypatch.setattr("common.extraction.local_extractor.load_model", lambda *_: smollm2)

    def run(folder, *flags, fault=None, drawn: list | None = None, **replaced):
        class Extractor(LocalExtractor):
            def states(self, streams):
                def noted():
                    for stream in streams:
                        if drawn is not None:
                            drawn.append(stream.id)
                        yield stream

                for stream, states in super().states(noted()):
                    yield stream, fault(stream, states) if fault else states

        with monkeypatch.context() as patch:
            patch.setattr("common.extraction.local_extractor.LocalExtractor", Extractor)
            return run_here("02", "--config", DEMO, "--run-dir", folder, *flags, **replaced)

    return run


def stored(folder) -> dict[str, tuple]:
    """Everything in the shards that the manifest names, by sample id."""
    manifest = Manifest.load(folder / "02_hidden", "02_hidden")
    assert manifest.verify(folder / "02_hidden") == []
    shards = [Shard(folder / "02_hidden" / name) for name in sorted(manifest.files)]
    found = {shard.facts[i]["id"]: shard.sequence(i) for shard in shards for i in range(len(shard))}
    # Copies: rows are views of the mapped file, and tests cut files short.
    return {
        id: (ids.clone(), mask.clone(), States(states.aux.clone(), states.last.clone()))
        for id, (ids, mask, states) in found.items()
    }


def same(one: dict, other: dict) -> None:
    """Equal ids and masks; states equal but for what another batch size does to bf16."""
    assert one.keys() == other.keys()
    for id, (ids, mask, states) in one.items():
        assert torch.equal(ids, other[id][0]) and torch.equal(mask, other[id][1])
        for mine, theirs in zip(vars(states).values(), vars(other[id][2]).values(), strict=True):
            mine, theirs = mine[1:].float(), theirs[1:].float()
            assert (mine - theirs).norm() < 0.04 * theirs.norm()


def leftovers(folder) -> list[str]:
    """Names in the stage's folder that neither the manifest nor a user knows."""
    named = {"manifest.json", *Manifest.load(folder / "02_hidden", "02_hidden").files}
    return [p.name for p in (folder / "02_hidden").iterdir() if p.name not in named]


# ---- deliberate faults: the on-policy check stops the run ----


def rolled(shift: int):
    """Ids shifted by one against the states."""
    return lambda stream, states: States(states.aux.roll(shift, 0), states.last.roll(shift, 0))


@pytest.fixture
def faults(smollm2):
    @torch.inference_mode()
    def after_the_norm(stream, states):
        return States(states.aux, smollm2.model.norm(states.last))

    @torch.inference_mode()
    def layer_before(stream, states):
        ids = torch.tensor([list(stream.ids)])
        return States(states.aux, smollm2(ids, output_hidden_states=True).hidden_states[29][0])

    @torch.inference_mode()
    def other_ids(stream, states):
        """What a target with another numbering of tokens computes."""
        [(_, wrong)] = LocalExtractor(Target(), Extract(), LAYERS).states([shifted(stream)])
        return wrong

    def shifted(stream):
        ids = type(stream.ids)("i", [id + 1 for id in stream.ids])
        return type(stream)(stream.id, ids, stream.mask, stream.facts)

    return {
        "one token late": rolled(1),
        "one token early": rolled(-1),
        "norm applied twice": after_the_norm,
        "last from layer N-1": layer_before,
        "ids of another tokenizer": other_ids,
    }


@pytest.mark.parametrize(
    "name",
    ["one token late", "one token early", "norm applied twice", "last from layer N-1", "ids of another tokenizer"],
)
def test_states_that_are_not_the_targets_stop_the_run(extract, run_copy, faults, name):
    folder = run_copy("01_synthetic")
    code, _, stderr = extract(folder, *FEW_A_SHARD, "--n", 4, fault=faults[name])
    assert code == 3, stderr
    said = only_error(stderr)
    assert "not the target's" in said and "sample" in said
    assert Manifest.load(folder / "02_hidden", "02_hidden").files == {}
    assert list((folder / "02_hidden").glob("shard-*")) == []
    if name == "one token late":  # the same folder goes on once the fault is gone
        code, _, stderr = extract(folder, *FEW_A_SHARD, "--n", 4)
        assert code == 0, stderr
        assert len(stored(folder)) == 4 and leftovers(folder) == []


def test_faulty_samples_are_counted_and_only_they_are_retried(extract, run_copy, tiny_run):
    """Case 18: NaN inside is never stored."""
    folder, bad = run_copy("01_synthetic"), []

    def spoil(stream, states):
        if len(bad) < 2:
            bad.append(stream.id)
            spoiled = states.last.clone()
            spoiled[3, 5] = float("nan")
            return States(states.aux, spoiled)
        return states

    code, _, stderr = extract(folder, *FEW_A_SHARD, fault=spoil)
    assert code == 1 and "2 of 10 sequences failed" in only_error(stderr)
    assert stored(folder).keys().isdisjoint(bad) and len(stored(folder)) == 8
    failures = [json.loads(line) for line in (folder / "02_hidden/failures-00000.jsonl").read_text().splitlines()]
    assert [(f["id"], "not finite" in f["reason"]) for f in failures] == [(id, True) for id in bad]
    assert not Manifest.load(folder / "02_hidden", "02_hidden").complete
    drawn = []
    assert extract(folder, *FEW_A_SHARD, drawn=drawn)[0] == 0
    assert sorted(drawn) == sorted(bad)
    same(stored(folder), stored(tiny_run))


# ---- resume ----


def test_sigkill_in_the_middle_then_the_rest(extract, run_copy, tiny_run):
    """Case 21: the rerun equals an unbroken run, and nothing of the killed one lies about."""
    folder = run_copy("01_synthetic")
    flags = ("--config", DEMO, "--run-dir", folder, *FEW_A_SHARD, "--batch-tokens", 80)
    process = subprocess.Popen(command("02", *flags), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    manifest = folder / "02_hidden/manifest.json"
    for _ in range(6000):
        if manifest.exists() and json.loads(manifest.read_text())["files"]:
            break
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = set(stored(folder))
    assert 0 < len(before) < 10
    drawn = []
    code, _, stderr = extract(folder, *FEW_A_SHARD, "--batch-tokens", 80, drawn=drawn)
    assert code == 0, stderr
    assert set(drawn) == set(stored(folder)) - before
    same(stored(folder), stored(tiny_run))
    assert leftovers(folder) == []


def test_more_samples_continue_the_run(extract, run_copy, tiny_run):
    folder = run_copy("01_synthetic")
    assert extract(folder, "--n", 4)[0] == 0
    first = (folder / "02_hidden/shard-00000.safetensors").read_bytes()
    assert extract(folder)[0] == 0
    assert (folder / "02_hidden/shard-00000.safetensors").read_bytes() == first
    same(stored(folder), stored(tiny_run))


def test_a_rerun_of_a_finished_run_changes_nothing(extract, run_copy):
    folder = run_copy("01_synthetic", "02_hidden")
    files = {p.name: p.stat().st_mtime_ns for p in (folder / "02_hidden").glob("shard-*")}
    before = Manifest.load(folder / "02_hidden", "02_hidden")
    drawn = []
    code, _, stderr = extract(folder, drawn=drawn)
    assert (code, drawn) == (0, []), stderr
    assert {p.name: p.stat().st_mtime_ns for p in (folder / "02_hidden").glob("shard-*")} == files
    assert Manifest.load(folder / "02_hidden", "02_hidden").counts == before.counts


@pytest.mark.parametrize("damage", ["bit", "half", "gone"])
def test_a_damaged_shard_is_extracted_again_alone(extract, run_copy, tiny_run, damage):
    folder = run_copy("01_synthetic")
    assert extract(folder, *FEW_A_SHARD)[0] == 0
    whole, shards = stored(folder), sorted((folder / "02_hidden").glob("shard-*"))
    assert len(shards) > 3
    others = {path: path.read_bytes() for path in shards[:1] + shards[2:]}
    lost = {fact["id"] for fact in Shard(shards[1]).facts}
    content = bytearray(shards[1].read_bytes())
    content[-2000] ^= 1
    shards[1].write_bytes(content if damage == "bit" else content[: len(content) // 2])
    if damage == "gone":
        shards[1].unlink()
    drawn = []
    code, out, stderr = extract(folder, *FEW_A_SHARD, "--verify", drawn=drawn)
    assert code == 0 and "shard-00001.safetensors is damaged or missing" in out, stderr
    assert set(drawn) == lost
    assert all(path.read_bytes() == content for path, content in others.items())
    same(stored(folder), whole)
    assert leftovers(folder) == ([] if damage == "gone" else ["shard-00001.safetensors.damaged"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--aux-layers", 2, 15, 26), "aux_layers: [2, 15, 27] there, [2, 15, 26] now"),
        (("--aux-layers", 3, 15), "[3, 15] now"),
        (("--store-dtype", "fp8"), "extract.store_dtype: 'bf16' there, 'fp8' now"),
        (("--max-tokens-per-sample", 64), "extract.max_tokens_per_sample: 1024 there, 64 now"),
    ],
)
def test_case_20_other_settings_are_refused_with_the_difference(extract, run_copy, flags, said):
    folder = run_copy("01_synthetic", "02_hidden")
    before = (folder / "02_hidden/manifest.json").read_bytes()
    code, _, stderr = extract(folder, *flags)
    assert code == 2 and said in only_error(stderr)
    assert (folder / "02_hidden/manifest.json").read_bytes() == before


def test_case_20_another_target_and_other_records_are_refused(extract, run_copy, demo_target, tmp_path):
    folder, other = run_copy("01_synthetic", "02_hidden"), tmp_path / "other"
    shutil.copytree(ROOT / demo_target, other)
    code, _, stderr = extract(folder, "--model", other)
    assert code == 2 and f"target.model: '{demo_target}' there, '{other}' now" in only_error(stderr)
    manifest = Manifest.load(folder / "01_synthetic", "01_synthetic")
    manifest.fingerprint["generate.seed"] = 7  # as if 01b had been made anew with another seed
    manifest.save(folder / "01_synthetic")
    code, _, stderr = extract(folder)
    assert code == 2 and "generate.seed: 0 there, 7 now" in only_error(stderr)


def test_a_disk_that_fills_up_pauses_the_run(extract, run_copy, tiny_run, small_disk):
    """What it needs was free at its start, then others wrote. What is finished stays, and the rerun does the rest."""
    shutil.copytree(run_copy("01_synthetic"), folder := small_disk / "run")
    ballast = small_disk / "of others"
    patch = {"check_free_space": lambda *_: ballast.write_bytes(bytes(5_500_000))}
    code, _, stderr = extract(folder, *FEW_A_SHARD, **patch)
    assert code == 3 and "the disk is full" in only_error(stderr)
    before = set(stored(folder))
    assert 0 < len(before) < 10 and leftovers(folder) == []
    code, _, stderr = extract(folder, *FEW_A_SHARD)
    assert code == 3 and "GiB needed" in only_error(stderr)
    ballast.unlink()
    drawn = []
    code, _, stderr = extract(folder, *FEW_A_SHARD, drawn=drawn)
    assert code == 0 and set(drawn) == set(stored(folder)) - before, stderr
    same(stored(folder), stored(tiny_run))


def test_a_limit_cuts_replies_and_drops_long_prompts(extract, run_copy, tiny_run):
    """Case 10 through the stage."""
    prompts = {id: int((~mask.bool()).sum()) for id, (_, mask, _) in stored(tiny_run).items()}
    limit = sorted(prompts.values())[4] + 1
    folder = run_copy("01_synthetic")
    code, _, stderr = extract(folder, "--max-tokens-per-sample", limit)
    assert code == 0, stderr
    found = stored(folder)
    assert found.keys() == {id for id, tokens in prompts.items() if tokens < limit}
    for id, (_, mask, _) in found.items():
        assert int(mask.sum()) == min(limit, len(stored(tiny_run)[id][0])) - prompts[id]
    dropped = Manifest.load(folder / "02_hidden", "02_hidden").counts["dropped"]
    assert sum(dropped.values()) == 10 - len(found) > 0
