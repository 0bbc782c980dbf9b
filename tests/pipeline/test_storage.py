"""Files that survive: torn lines, kills in the middle of a write, full disks, locks, manifests, refused resumes."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.pipeline.errors import SafetyStop, UserError
from common.pipeline.files import atomic_path, check_free_space, digest, read_json, sha256, write_json, write_text
from common.pipeline.jsonl import JsonlParts, json_line, read_jsonl, repair_jsonl
from common.pipeline.manifest import Manifest, open_stage, stage_lock
from tests.support.stages import ROOT, only_error

RECORDS = st.lists(st.dictionaries(st.text(max_size=8), st.text(max_size=30) | st.integers(), max_size=3), max_size=6)


def script(code: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]


# ---- JSONL ----


@given(records=RECORDS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_cut_of_a_file_keeps_exactly_its_whole_lines(records, data):
    whole = b"".join(map(json_line, records))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part-00000.jsonl"
        path.write_bytes(cut)
        assert repair_jsonl(path) == len(cut) - (cut.rfind(b"\n") + 1)
        assert list(read_jsonl(path)) == records[: cut.count(b"\n")]
        assert repair_jsonl(path) == 0


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path):
    path = tmp_path / "part-00000.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 200_000)
    assert JsonlParts(tmp_path).torn_bytes == 200_000
    assert list(read_jsonl(path)) == [{"a": 1}]
    path.write_bytes(b"y" * 200_000)
    assert repair_jsonl(path) == 200_000 and path.read_bytes() == b""


def test_appending_goes_on_behind_the_last_whole_line(tmp_path):
    first = JsonlParts(tmp_path, part_records=2)
    for i in range(3):
        first.append({"i": i})
    first.close()
    with open(tmp_path / "part-00001.jsonl", "ab") as file:
        file.write(b'{"i": 99')
    second = JsonlParts(tmp_path, part_records=2)
    for i in range(3, 6):
        second.append({"i": i})
    second.close()
    assert [record["i"] for record in second.read()] == list(range(6))
    assert [path.read_bytes().count(b"\n") for path in second.paths()] == [2, 2, 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b'{"a": 1}\n{"b": \n', ":2: not JSON"), (b'{"a": 1}\n{"b": 2', ":2: a torn last line"), (b"[1]\n", ":1: a rec")],
)
def test_a_line_that_does_not_parse_is_named(tmp_path, content, said):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=f"x.jsonl{said}"):
        list(read_jsonl(tmp_path / "x.jsonl"))


def test_text_that_utf8_cannot_hold_survives(tmp_path):
    parts = JsonlParts(tmp_path)
    parts.append({"text": "half \ud83d of an emoji\u2028and a line separator"})
    assert list(parts.read()) == [{"text": "half \ud83d of an emoji\u2028and a line separator"}]
    with pytest.raises(ValueError):
        parts.append({"x": float("nan")})
    assert len(list(parts.read())) == 1


# ---- atomic writes ----


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError):
        write_json(path, {"new": float("nan")})
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_sigkill_in_the_middle_of_a_write_leaves_no_final_name(tmp_path):
    code = f"""
from pathlib import Path
from common.pipeline.files import atomic_path
with atomic_path(Path({str(tmp_path)!r}) / "final.bin") as temporary:
    with open(temporary, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 65536)
            print("written", flush=True)
"""
    with subprocess.Popen(script(code), stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 1 and names[0].startswith(".final.bin.tmp-")
    open_stage(tmp_path, "x", {}, {})  # the next run removes what the killed one left half written
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_disk_full_stops_with_one_line_and_nothing_partial(small_disk):
    code = f"""
from pathlib import Path
from common.pipeline.errors import guarded
from common.pipeline.jsonl import JsonlParts
from common.pipeline.files import write_text
folder = Path({str(small_disk)!r})
def main():
    parts = JsonlParts(folder)
    for i in range(100):
        parts.append({{"i": i, "text": "x" * 300_000}})
guarded(main)
"""
    done = subprocess.run(script(code), capture_output=True, text=True)
    assert done.returncode == SafetyStop.exit_code and "disk is full" in only_error(done.stderr)
    parts = JsonlParts(small_disk)  # the line that did not fit is torn, and cut off
    kept = [record["i"] for record in parts.read()]
    assert parts.torn_bytes > 0 and kept == list(range(len(kept))) and len(kept) > 20
    with pytest.raises(OSError, match="No space"):
        write_text(small_disk / "report.html", "y" * 9_000_000)
    assert not (small_disk / "report.html").exists() and not list(small_disk.glob(".*"))
    with pytest.raises(SafetyStop, match=r"0\.50 GiB needed"):
        check_free_space(small_disk / "not" / "there" / "yet", 2**29)


# ---- locks ----


def test_a_folder_that_another_process_holds_is_refused_until_it_dies(tmp_path):
    code = f"""
import time
from pathlib import Path
from common.pipeline.manifest import stage_lock
with stage_lock(Path({str(tmp_path)!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(script(code), stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        started = time.monotonic()
        with pytest.raises(UserError, match="another process is writing"), stage_lock(tmp_path):
            pass
        assert time.monotonic() - started < 5  # it says so at once
        process.send_signal(signal.SIGKILL)
    with stage_lock(tmp_path):
        pass


# ---- manifests ----


@pytest.fixture
def stage(tmp_path):
    folder = tmp_path / "02_hidden"
    manifest = open_stage(folder, "02_hidden", {"seed": 1, "layers": [2, 15]}, {"x": 1})
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(name.encode() * 10)
        manifest.add_file(folder, name, tokens=5)
    manifest.save(folder)
    return folder


def test_a_manifest_comes_back_and_verifies_wherever_the_folder_is(stage):
    manifest = Manifest.load(stage, "02_hidden")
    assert manifest.verify(stage) == []
    assert manifest.files["a.bin"] == {"bytes": 50, "sha256": sha256(stage / "a.bin"), "tokens": 5}
    moved = stage.rename(stage.with_name("moved"))
    assert Manifest.load(moved, "02_hidden").verify(moved) == []


def test_verify_names_what_is_missing_short_or_changed(stage):
    manifest = Manifest.load(stage, "02_hidden")
    (stage / "b.bin").write_bytes(b"B" + (stage / "b.bin").read_bytes()[1:])
    assert manifest.verify(stage) == ["b.bin"]
    assert manifest.verify(stage, hashes=False) == []
    (stage / "b.bin").write_bytes(b"B")
    assert manifest.verify(stage, hashes=False) == ["b.bin"]
    (stage / "a.bin").unlink()
    assert manifest.verify(stage, hashes=False) == ["a.bin", "b.bin"]


def test_other_settings_are_refused_with_the_difference(stage):
    with pytest.raises(UserError) as caught:
        open_stage(stage, "02_hidden", {"seed": 2, "layers": [2, 15], "new": True}, {})
    said = str(caught.value)
    assert "seed: 1 there, 2 now" in said and "new: 'absent' there, True now" in said and "layers" not in said
    assert "--fresh" in said
    assert (stage / "a.bin").exists()


def test_the_same_settings_resume(stage):
    assert open_stage(stage, "02_hidden", {"layers": [2, 15], "seed": 1}, {"x": 2}).files.keys() == {"a.bin", "b.bin"}


def test_fresh_sets_aside_and_deletes_nothing(stage, capsys):
    for times in (1, 2):  # twice within a second, too
        manifest = open_stage(stage, "02_hidden", {"seed": times}, {}, fresh=True)
        assert manifest.files == {} and [path.name for path in stage.iterdir()] == ["manifest.json"]
        aside = sorted(stage.parent.glob("02_hidden.before-*"))
        assert len(aside) == times
        assert aside[0].name in capsys.readouterr().out or times == 2
    assert any((path / "a.bin").exists() for path in aside)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not JSON"),
        ('{"stage": "02_hid', "not JSON"),
        ("[1]", "not a manifest"),
        ('{"hello": 1}', "not a manifest"),
        (json.dumps({"stage": "03_dataset", "fingerprint": {}}), "expected '02_hidden'"),
        (json.dumps({"stage": "02_hidden", "fingerprint": {}, "format": 99}), "format 99"),
    ],
)
def test_a_foreign_manifest_is_refused_by_name(stage, content, said):
    (stage / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=said) as caught:
        Manifest.load(stage, "02_hidden")
    assert "manifest.json" in str(caught.value)


def test_a_folder_without_manifest_names_the_stage_to_run(tmp_path):
    with pytest.raises(UserError, match="01_synthetic"):
        Manifest.load(tmp_path, "01_synthetic")


def test_digest_ignores_the_order_of_keys_and_sees_values():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})
