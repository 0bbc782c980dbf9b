"""Stage 04: train the EAGLE-3 draft, measure its acceptance on held-out replies, export what vLLM and SGLang load.

    python 04_train.py --config configs/kimi-k2.5.toml
    torchrun --nproc-per-node 8 04_train.py --config configs/kimi-k2.5.toml [--parallel fsdp]
    python 04_train.py --config configs/kimi-k2.5.toml --warm-start FOLDER-OF-A-PUBLISHED-DRAFT
    python 04_train.py --config configs/demo.toml --epochs 3
    torchrun --nproc-per-node 8 04_train.py --follow      beside 02_extract_hidden.py --window 500GB
    python 04_train.py --export-only runs/kimi-k2.5/04_draft/checkpoints/step-00000200
    python 04_train.py --check-export runs/kimi-k2.5/04_draft/export
    python 04_train.py --serve-eval http://localhost:8000 --without-draft http://localhost:8001 --questions file.jsonl

Reads RUN/03_dataset and the shards of RUN/02_hidden; writes RUN/04_draft: checkpoints, metrics.jsonl, report.json,
report.html and export/, the folder to serve: the checkpoint with the best held-out acceptance length.
Ctrl-C and SIGTERM checkpoint first; the same command goes on, to the same losses as an unbroken run.
--check-export says what vLLM and SGLang would do with any EAGLE-3 folder, ours or a published one.
--serve-eval asks a running vLLM server and reads its counters; adds them to report.json and report.html.
"""

import time
from pathlib import Path

from common.forecast.tables import ask_nobody, is_there, show_forecast, show_missing
from common.pipeline.command_line import Settings, load_settings
from common.pipeline.console import Progress, say, table
from common.pipeline.errors import TooManyFailures, UserError, guarded
from common.pipeline.files import write_text
from common.pipeline.manifest import DATASET, DRAFT, HIDDEN, MANIFEST, Manifest, open_stage, stage_lock

STAGE, INPUT, STATES = DRAFT, DATASET, HIDDEN
SWITCHES = {
    "follow": "train beside 02 --window: wait for its shards, delete them once they are trained on",
    "export-only=CHECKPOINT": "export this checkpoint of the run instead of the best one; train nothing",
    "check-export=FOLDER": "say what vLLM and SGLang would do with an EAGLE-3 folder; needs no run",
}
MAX_FAILED_SHARE = 0.05  # of --serve-eval's questions


def main() -> int | None:
    settings = load_settings(None, __doc__, ("target", "draft", "train", "serving", "forecast"), SWITCHES)
    folder, source = settings.run_dir / STAGE, settings.run_dir / INPUT
    if settings.switches.check_export:
        from common.export.engine_check import print_findings

        return print_findings(Path(settings.switches.check_export))
    if settings.serving.serve_eval:
        return measure_serving(settings, folder)
    checkpoint = chosen_checkpoint(settings, folder) if settings.switches.export_only else None
    if settings.dry_run:
        ask_nobody()
        if not is_there(source):
            return show_missing(settings, "04", source)
    dataset = Manifest.load(source, INPUT)
    bad = dataset.verify(source)
    if bad or not dataset.complete:
        raise UserError(f"{source}{f'/{bad[0]} is not what 03 wrote' if bad else ' is not complete'}; rerun 03")

    from common.export.warm_start import weight_hashes
    from common.training.ranks import start_ranks
    from common.training.run import TrainingRun

    ranks = start_ranks(settings.device)
    if checkpoint and ranks.world > 1:
        raise UserError("--export-only is one process's work: run it without torchrun")
    run = TrainingRun(settings, dataset, source, settings.run_dir / STATES, ranks)
    if ranks.first:
        say(f"04 train: {source} -> {folder}" + " (dry run)" * settings.dry_run)
        table(run.plan())
    if settings.dry_run:
        return show_forecast(settings) if ranks.first else 0
    with stage_lock(settings.run_dir / f".{STAGE}-{ranks.rank}"):
        fingerprint = dataset.fingerprint | settings.fingerprint()
        if settings.train.warm_start:
            fingerprint["train.warm_start"] = weight_hashes(settings.train.warm_start)  # wherever the folder lies
        manifest = None
        if ranks.first:
            manifest = open_stage(folder, STAGE, fingerprint, settings.as_dict(), settings.fresh)
        ranks.wait()  # until the folder is the one that all of them shall read
        run.open(folder)
        if run.step < run.total_steps and not checkpoint:
            train(run)
        if ranks.first:
            finish(run, folder, manifest, settings, checkpoint)
    return None


def chosen_checkpoint(settings: Settings, folder: Path) -> Path:
    """The checkpoint of --export-only; raises UserError where it is none of this run."""
    path, own = Path(settings.switches.export_only), folder / "checkpoints"
    if not (path / "state.json").is_file() or path.resolve().parent != own.resolve():
        found = ", ".join(sorted(p.name for p in own.glob("step-*"))) or "none"
        raise UserError(f"--export-only {path}: no checkpoint of {folder} (there: {found}); set --run-dir to its run")
    if settings.fresh:
        raise UserError("--export-only and --fresh contradict each other: --fresh would set the checkpoint aside")
    return path


def train(run) -> None:
    """The training loop: unrolled steps over packs, the optimizer, held-out acceptance, checkpoints."""
    import torch

    from common.training.batches import global_counts, prefetched, step_packs
    from common.training.optimizer import GRAD_CLIP, learning_rate
    from common.training.ranks import StopSignal, gradients, whole

    s, ranks, stop = run.settings.train, run.ranks, StopSignal(run.ranks)
    if not run.baselines:
        run.measure_baselines()
    wanted = (step_packs(run.order, step, s, ranks) for step in range(run.step, run.total_steps))
    if run.follower:
        wanted = run.follower.ready(wanted, stop)
    with Progress("train", run.total_steps, "steps", done=run.step, shown=ranks.first) as progress:
        for batch in prefetched(run.packs, wanted, ranks.device):
            started = time.monotonic()
            counts = global_counts(batch, s.unrolled_steps, ranks)
            results = []
            for pack in batch:
                with gradients(run.module, last=pack is batch[-1]):
                    results.append(run.module(pack, counts))
                    # This pack's share of the mean over all ranks' packs; ranks average where we need the sum.
                    (results[-1].loss * ranks.world).backward()
            norm = whole(torch.nn.utils.clip_grad_norm_(run.trained, GRAD_CLIP))
            run.check_finite(batch, results, norm)
            for group in run.optimizer.param_groups:
                group["lr"] = learning_rate(run.step, run.total_steps, s)
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)

            run.step += 1
            run.tokens += int(ranks.sum(torch.tensor([sum(len(pack.input_ids) for pack in batch)])))
            run.log_step(batch, results, counts, norm, time.monotonic() - started, progress)
            last, stopping = run.step == run.total_steps, stop.asked()
            best = (last or run.step % run.eval_every == 0) and run.evaluate()
            if best or last or stopping or run.checkpoint_due():
                run.checkpoint()
            if stopping and not last:
                raise KeyboardInterrupt
    if run.step < run.total_steps:  # asked to stop while the first shards of a window were not there
        raise KeyboardInterrupt


def finish(run, folder: Path, manifest: Manifest, settings: Settings, checkpoint: Path | None = None) -> None:
    """Export the best checkpoint, or the given one, write the report and the manifest, print the summary."""
    from common.export.model_card import model_card
    from common.export.served_folder import describe, export
    from common.export.speculators_layout import write_speculators
    from common.training.checkpoint import load_checkpoint
    from common.training.held_out import DRAFT_COST

    chosen = load_checkpoint(checkpoint, run.draft, None)["step"] if checkpoint else run.load_best()
    figures, replies = run.measure()
    served, other, k = folder / "export", folder / "export-speculators", int(run.main_k)
    findings = export(served, run.draft, run.d2t, run.t2d, run.aux_layers, run.text)
    card = model_card(settings.target, str(served), run.report_facts(chosen), figures, k, findings)
    write_text(served / "README.md", card)
    if settings.serving.export_format == "speculators" or other.exists():  # never two exports of different weights
        write_speculators(other, served, settings.target.model, k)
    run.write_report(chosen, replies)
    run.loggers.close()
    main = figures["walk"].get(run.main_k, {"accepted": []})
    kept = "  ".join(f"{n / main['drafts']:.0%}" for n in main["accepted"])
    every, agreed = (figures[name].get(run.main_k, 1) for name in ("per_position", "per_position_argmax"))
    per_position = f"{every:.3f}, {agreed:.3f} against the target's first choice"
    speeds = "  ".join(f"{k}: {speed:.2f}x" for k, speed in figures["speed_up"].items() if speed)

    def length(of: dict) -> str:
        value = of.get("walk", {}).get(run.main_k, {}).get("length")
        return f"{value:.3f}" if value else "-"

    for path in (*served.iterdir(), *(other.iterdir() if other.exists() else ())):
        manifest.add_file(folder, str(path.relative_to(folder)))
    for name in ("metrics.jsonl", "report.json", "report.html"):
        manifest.add_file(folder, name)
    manifest.counts = {"steps": run.step, "tokens": run.tokens, "seconds": run.seconds, "chosen_step": chosen}
    manifest.counts |= {"acceptance": figures, "baselines": run.baselines}
    manifest.complete = manifest.complete or run.step == run.total_steps
    manifest.save(folder)
    say(f"04 done: {run.step} steps, {run.tokens:,} tokens in {run.seconds:.0f} s of training")
    table(
        [
            (f"acceptance length, k={run.main_k}", f"{length(figures)} at step {chosen}, on held-out replies"),
            ("untrained draft", length(run.baselines.get("untrained", {}))),
            ("bigram floor", length(run.baselines.get("bigram", {}))),
            ("k = 1..", "  ".join(f"{k}: {w['length']:.3f}" for k, w in figures["walk"].items() if w["length"])),
            ("per position", per_position),
            ("accepted by position", kept or "-"),
            ("estimated speed-up", f"{speeds or '-'}  (a draft step costs {DRAFT_COST:g} of a forward)"),
            ("export", f"{folder / 'export'}: {describe(folder / 'export')}"),
            ("report", str(folder / "report.html")),
        ]
    )


def measure_serving(settings: Settings, folder: Path) -> None:
    """Ask a running server that drafts; adds its figures to report.json and report.html, and prints them."""
    from common.report.report import update_report
    from common.servers.measure_draft import QUESTIONS, measure, read_questions, summary

    s = settings.serving
    questions = read_questions(s, settings.questions, settings.n or QUESTIONS)
    say(f"04 serve-eval: {s.serve_eval}{f' and {s.without_draft}' * bool(s.without_draft)}")
    source = s.questions or f"{settings.questions.dataset}, in another order than 01's"
    asked = f"temperature {s.eval_temperature:g}, at most {s.eval_max_tokens:,} tokens, {s.eval_concurrency} at a time"
    table([("questions", f"{len(questions)} of {source}"), ("asked", asked)])
    if settings.dry_run:
        return
    facts = measure(s, settings.target, settings.generate, questions)
    shown = update_report(folder, serving=facts)
    table([*summary(facts), ("written", str(folder / "report.json"))])
    try:
        with stage_lock(settings.run_dir / f".{STAGE}-0"):
            if (folder / MANIFEST).exists():
                manifest = Manifest.load(folder, STAGE)
                for name in ("report.json", "report.html") if shown else ("report.json",):
                    manifest.add_file(folder, name)
                manifest.save(folder)
    except UserError as error:
        say(f"  {error}: it will enter the report in the manifest when it ends")
    say(f"  {folder / 'report.html'}: {'has' if shown else 'will have'} a section on the server")
    failed = facts["with_draft"]["failed"]
    if failed > MAX_FAILED_SHARE * len(questions):
        raise TooManyFailures(f"{failed} of {len(questions)} questions failed; {folder / 'report.json'} has the others")


if __name__ == "__main__":
    guarded(main)
