"""What a run shows: evaluation figures, utilisation, loggers, and a report that grows and compares."""

import json
import sys
import types

import pytest

from common.training.held_out import HeldOut, evaluate, speed_ups
from common.training.loggers import Loggers
from common.training.ranks import Ranks
from tests.support.stages import only_error
from tests.support.tiny_training import metrics, train
from tests.support.unrolled_case import Case, config, make_pack

# ---- figures ----


def test_agreement_with_the_target_is_joint_and_over_every_position():
    pack = make_pack([14, 9, 12], 24, 4)
    case = Case(config(draft_vocab=15), pack, steps=3)
    packs = types.SimpleNamespace(prefetch=lambda schedule: (pack for _ in schedule))
    figures, _ = evaluate(case.module(), HeldOut(packs, [[0]], None, None), Ranks(0, 1, "cpu"), 4)
    case.steps = 4
    right = case.module()(pack).right_argmax
    for k in range(1, 5):
        leading = [int(right[:k, n].long().cumprod(0).sum()) for n in range(right.shape[1])]
        assert figures["per_position_argmax"][k] == pytest.approx(1 + sum(leading) / len(leading))
    assert set(figures["speed_up"]) == set(figures["walk"])


def test_a_speed_up_pays_for_its_draft_steps():
    walk = {1: {"length": 1.5}, 3: {"length": 2.0}, 5: {"length": None}}
    assert speed_ups(walk, 0.1) == {1: pytest.approx(1.5 / 1.1), 3: pytest.approx(2.0 / 1.3), 5: None}
    assert speed_ups(walk, 0.0)[3] == 2.0


def test_evaluation_unrolls_further_than_training_with_the_same_powers():
    case = Case(config(), make_pack([14, 9], 24, 4), steps=2, step_weight=0.5).module()
    assert case.loss_weights(4).tolist() == [1.0, 0.5, 0.25, 0.125]


# ---- loggers ----


class Writer:
    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.lines = folder, purge_step, []
        Writer.last = self

    def add_scalar(self, name, value, step):
        self.lines.append((name, value, step))

    def close(self):
        self.lines.append("closed")


def test_metrics_go_to_both_services(tmp_path, monkeypatch):
    sent = []
    service = types.SimpleNamespace(
        init=lambda **facts: sent.append(facts) or service,
        log=lambda values, step: sent.append((values, step)),
        finish=lambda: sent.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", service)
    loggers = Loggers(tmp_path / "run/04_draft", ("tensorboard", "wandb"), 6, {"train": {"seed": 0}})
    line = {"kind": "eval", "step": 7, "loss": 1.5, "walk": {"1": {"length": None, "accepted": [3, 1]}}, "note": "x"}
    loggers.log(line)
    loggers.close()
    wanted = {"eval/loss": 1.5, "eval/walk/1/accepted/0": 3, "eval/walk/1/accepted/1": 1}
    assert Writer.last.lines == [*((name, value, 7) for name, value in wanted.items()), "closed"]
    assert Writer.last.purge_step == 7  # what a killed run wrote after its last checkpoint comes again
    assert sent[0]["name"] == "run" and sent[0]["resume"] == "allow" and sent[1:] == [(wanted, 7), "finished"]


@pytest.mark.parametrize(("flag", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_service_that_is_not_installed_is_one_line_before_the_first_step(run, monkeypatch, flag, module):
    monkeypatch.setitem(sys.modules, module, None)
    code, _, stderr = train(run, "--track", flag)
    assert code == 2 and f"{flag} is not installed" in only_error(stderr) and f"pip install {flag}" in stderr
    assert metrics(run, "train") == []


# ---- report ----


def test_the_report_grows_with_each_evaluation_and_shows_other_runs(run, tmp_path, monkeypatch):
    import common.training.journal as module

    seen, real = [], module.write_report

    def watched(folder, facts, lines, samples, others):
        seen.append((facts["chosen_step"], len([m for m in lines if m["kind"] == "eval"]), len(samples), set(others)))
        real(folder, facts, lines, samples, others)

    other = tmp_path / "other-run"
    (other / "04_draft").mkdir(parents=True)
    line = {"kind": "eval", "step": 3, "walk": {"3": {"length": 2.5, "drafts": 4, "accepted": [3, 2, 1]}}}
    (other / "04_draft/metrics.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(module, "write_report", watched)
    code, out, stderr = train(run, "--eval-every", 2, "--compare", other)
    assert code == 0, stderr
    assert [evaluations for _, evaluations, *_ in seen] == [1, 2, 3, 3]  # steps 2, 4, 5 and the end
    assert all(samples == 3 and others == {"other-run"} for *_, samples, others in seen)
    assert "other-run" in (run / "04_draft/report.html").read_text()
    assert all(0 < line["utilisation"] < 5 for line in metrics(run, "train"))
    assert "estimated speed-up" in out and "accepted by position" in out
