"""Settings: flags over file over defaults, nothing unknown passes, the fingerprint holds content and nothing else."""

import json
from dataclasses import fields

import pytest

from common.pipeline.command_line import load_settings
from common.pipeline.errors import UserError
from common.pipeline.settings import SECTIONS, Train
from tests.support.stages import ROOT, STAGE_SECTIONS

EXTRACT = ("target", "extract", "forecast")


@pytest.fixture
def config(tmp_path):
    """Writes a TOML and returns the flags that name it."""

    def write(text: str) -> list[str]:
        (tmp_path / "some.toml").write_text(text)
        return ["--config", str(tmp_path / "some.toml")]

    return write


def load(argv, *sections, switches=None):
    return load_settings([str(arg) for arg in argv], "a stage", sections or EXTRACT, switches)


def refused(argv, *sections) -> str:
    with pytest.raises(UserError) as caught:
        load(argv, *sections)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flags_beat_the_file_and_the_file_beats_the_defaults(config):
    argv = config("[train]\nepochs = 5\nlearning_rate = 0.5\n[extract]\naux_layers = [1, 2, 3]\n")
    assert type(load(argv, "train").train.epochs) is float
    settings = load([*argv, "--epochs", "2.5"], "target", "train")
    assert (settings.train.epochs, settings.train.learning_rate, settings.train.seed) == (2.5, 0.5, Train.seed)
    assert load(argv).extract.aux_layers == (1, 2, 3)
    assert load([*argv, "--aux-layers", 4, 5]).extract.aux_layers == (4, 5)
    assert load([*argv, "--no-thinking"], "generate").generate.thinking is False


def test_run_dir_is_named_after_the_config(config):
    assert load(config("")).run_dir.as_posix() == "runs/some"
    assert load([*config(""), "--run-dir", "x/y"]).run_dir.as_posix() == "x/y"


def test_switches_are_no_settings(config):
    assert load([*config(""), "--verify"], *EXTRACT, switches={"verify": "check"}).switches.verify is True


@pytest.mark.parametrize(
    ("toml", "flags", "said"),
    [
        ("[train]\nlerning_rate = 1.0", [], "did you mean 'learning_rate'?"),
        ("[trian]\nepochs = 1", [], "did you mean 'train'?"),
        ("epochs = 1", [], "unknown section [epochs]"),
        ("[generate]\nmax_token = 5", [], "did you mean 'max_tokens'?"),  # of a section that the stage does not read
        ("", ["--max-tokens-per-sampel", "5"], "did you mean '--max-tokens-per-sample'?"),
        ("", ["--epochs", "5"], "unknown flag --epochs"),  # of a section that the stage does not read
        ("", ["--max-tokens", "5"], "unknown flag --max-tokens"),  # never taken for --max-tokens-per-sample
        ("", ["stray"], "unknown flag stray"),
        ("", ["--device"], "expected one argument"),
        ("", ["--shard-gib", "big"], "invalid float value: 'big'"),
        ("", ["--extractor", "sglang"], "--extractor must be one of vllm, local, not 'sglang'"),
        ("", ["--n", "0"], "must be at least 1"),
        ("[extract]\nshard_gib = '1'", [], "extract.shard_gib must be float, not '1'"),
        ("[extract]\nshard_gib = true", [], "extract.shard_gib must be float, not True"),
        ("[extract]\nbatch_tokens = 1.5", [], "extract.batch_tokens must be int, not 1.5"),
        ("[extract]\naux_layers = 2", [], "extract.aux_layers must be a list of int, not 2"),
        ("[extract]\naux_layers = [2, 'x']", [], "must be a list of int"),
        ("[target]\ntrust_remote_code = 1", [], "target.trust_remote_code must be bool, not 1"),
        ("[extract]\nextractor = 'sglang'", [], "must be one of vllm, local, not 'sglang'"),
        ("[extract]\nbatch_tokens = 0", [], "extract.batch_tokens must be at least 1, not 0"),
        ("[extract]\nshard_gib = nan", [], "extract.shard_gib must be at least 0, not nan"),
        ("", ["--aux-layers", "-1", "3"], "--aux-layers must be at least 0, not -1 3"),
        ("", ["--think-open-id", "-2"], "--think-open-id must be at least -1, not -2"),
        ("extract = 3", [], "[extract] must be a table"),
        ("target = 3", [], "[target] must be a table"),
        ("", ["--n", "x"], "invalid int value: 'x'"),
        ("", ["--spool"], "expected one argument"),
        ("[train]\ntrack = ['mlflow']", [], "train.track must be one of tensorboard, wandb, not ['mlflow']"),
        ("[dataset]\npack_tokens = 5", [], "did you mean 'sample_tokens'?"),  # as version 0.1 called it
        ("[extract", [], "not a TOML file"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(config, toml, flags, said):
    assert said in refused([*config(toml), *flags])


def test_a_config_that_is_not_there(tmp_path):
    assert "no such config" in refused(["--config", tmp_path / "none.toml"])
    assert str(tmp_path) in refused(["--config", tmp_path])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "not a TOML file" in refused(["--config", tmp_path / "binary.toml"])


def test_fingerprint_is_the_content_and_json(config):
    plain = load(config("")).fingerprint()
    assert json.loads(json.dumps(plain)) == plain  # compares equal to what a manifest gives back
    assert load([*config(""), "--n", "7", "--run-dir", "elsewhere", "--dry-run", "--fresh"]).fingerprint() == plain
    for sections in STAGE_SECTIONS.values():
        keys = load(config(""), *sections).fingerprint().keys()
        want = [f"{name}.{f.name}" for name in sections for f in fields(SECTIONS[name]) if f.metadata["in_fingerprint"]]
        assert list(keys) == want


def test_fingerprint_tells_content_from_speed(config):
    def fingerprint(*flags):
        return load([*config(""), *flags], *EXTRACT).fingerprint()

    assert fingerprint("--shard-gib", 0.5, "--device", "cpu", "--batch-tokens", 64, "--extractor", "local") == (
        fingerprint()
    )
    assert fingerprint("--aux-layers", 1, 2, 3) != fingerprint()
    assert fingerprint("--max-tokens-per-sample", 5) != fingerprint()
    assert fingerprint("--model", "x") != fingerprint()


def test_a_stage_stores_its_own_sections_and_reads_all(config):
    argv = [*config("[train]\nepochs = 7\n"), "--spool", "/x"]
    settings = load(argv, *EXTRACT)
    assert set(settings.as_dict()) == set(EXTRACT)
    assert settings.train.epochs == 7  # as the TOML says: what a dry run of 02 tells of 04
    assert settings.extract.spool == "/x"
    with pytest.raises(AttributeError, match="trian"):
        _ = settings.trian


def test_what_is_shipped_of_a_target_is_of_the_tomls_own_model(config, tmp_path):
    argv = config("[target]\nmodel = 'a'\n[forecast]\nweights_gb = 5\n")
    (tmp_path / "some.config.json").write_text("{}")
    settings = load(argv)
    assert settings.shipped_config == tmp_path / "some.config.json"
    assert settings.forecast.weights_gb == 5
    other = load([*argv, "--model", "b"])
    assert other.shipped_config is None
    assert other.forecast.weights_gb == 0
    assert load([*argv, "--model", "b", "--weights-gb", 3]).forecast.weights_gb == 3


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_ready_config_loads(path):
    for sections in STAGE_SECTIONS.values():
        assert load(["--config", path], *sections).target.model
