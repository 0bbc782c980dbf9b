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
Ctrl-C and SIGTERM write a checkpoint first; the same command resumes from it, to the losses of an unbroken run.
--check-export prints what vLLM and SGLang would do with any EAGLE-3 folder, ours or a published one.
--serve-eval asks a running vLLM server and reads its counters; adds them to report.json and report.html.
"""

import time
from pathlib import Path

from common.forecast.tables import go_offline, show_forecast, show_input_missing, stage_started
from common.pipeline.command_line import Settings, load_settings
from common.pipeline.console import Progress, say, table
from common.pipeline.errors import TooManyFailures, UserError, guarded
from common.pipeline.files import write_text
from common.pipeline.manifest import DATASET, DRAFT, MANIFEST, Manifest, open_stage, stage_lock

SWITCHES = {
    "follow": "train beside 02 --window: wait for its shards, delete them once they are trained on",
    "export-only=CHECKPOINT": "export this checkpoint of the run instead of the best one; train nothing",
    "check-export=FOLDER": "print what vLLM and SGLang would do with an EAGLE-3 folder; needs no run",
}
MAX_FAILED_SHARE = 0.05  # of --serve-eval's questions


def main() -> int | None:
    settings = load_settings(None, __doc__, ("target", "draft", "train", "serving", "forecast"), SWITCHES)
    folder, source = settings.run_dir / DRAFT, settings.run_dir / DATASET
    if settings.switches.check_export:
        from common.export.engine_check import print_findings

        return print_findings(Path(settings.switches.check_export))
    if settings.serving.serve_eval:
        return measure_serving(settings, folder)
    checkpoint = chosen_checkpoint(settings, folder) if settings.switches.export_only else None
    if settings.dry_run:
        go_offline()
        if not stage_started(source):
            return show_input_missing(settings, "04", source)
    dataset = Manifest.load(source, DATASET)
    bad = dataset.verify(source)
    if bad or not dataset.complete:
        raise UserError(f"{source}{f'/{bad[0]} is not what 03 wrote' if bad else ' is not complete'}; rerun 03")

    from common.draft.kernels import compile_loops, keep_freed_memory, missing_compiler
    from common.export.warm_start import weight_hashes
    from common.training.inputs import Inputs
    from common.training.journal import Journal
    from common.training.loggers import other_runs
    from common.training.ranks import start_ranks
    from common.training.trainer import Trainer

    ranks = start_ranks(settings.device)
    if checkpoint and ranks.world > 1:
        raise UserError("--export-only runs in one process: leave torchrun out")
    keep_freed_memory()  # this and the next two lines are switches of the whole process
    missing = missing_compiler(ranks.device) if settings.train.compile else ""
    compile_loops(settings.train.compile and not missing)
    others = other_runs(settings.train.compare, DRAFT)
    inputs = Inputs(settings, dataset, ranks)
    trainer = Trainer(inputs, settings, ranks)
    if ranks.first:
        say(f"04 train: {source} -> {folder}" + " (dry run)" * settings.dry_run)
        table(trainer.facts())
        if missing:
            say(f"  {missing}, so torch.compile is off and training is slower; --no-compile says so without this line")
    if settings.dry_run:
        return show_forecast(settings) if ranks.first else 0
    with stage_lock(settings.run_dir / f".{DRAFT}-{ranks.rank}"):
        fingerprint = dataset.fingerprint | settings.fingerprint()
        if settings.train.warm_start:  # fingerprinted by its weights, so that the folder can be moved
            fingerprint["train.warm_start"] = weight_hashes(settings.train.warm_start)
        manifest = open_stage(folder, DRAFT, fingerprint, settings.as_dict(), settings.fresh) if ranks.first else None
        ranks.wait()  # the other ranks read checkpoints only after --fresh has set the old folder aside
        resumed = trainer.resume()
        if resumed and ranks.first:
            say(f"  resumed from {resumed.name}")
        journal = Journal(folder, settings, inputs, trainer, others)
        if inputs.follower:
            inputs.follower.open(trainer.step, inputs.held_out)
        if trainer.step < inputs.total_steps and not checkpoint:
            train(inputs, trainer, journal)
        if ranks.first:
            finish(inputs, trainer, journal, manifest, settings, checkpoint)
    return None


def chosen_checkpoint(settings: Settings, folder: Path) -> Path:
    """The checkpoint of --export-only; raises UserError for a path that is no checkpoint of this run."""
    path, checkpoints = Path(settings.switches.export_only), folder / "checkpoints"
    if not (path / "state.json").is_file() or path.resolve().parent != checkpoints.resolve():
        names = ", ".join(sorted(p.name for p in checkpoints.glob("step-*"))) or "none"
        raise UserError(f"--export-only {path}: no checkpoint of {folder}, which has {names}; set --run-dir to its run")
    if settings.fresh:
        raise UserError("--export-only and --fresh contradict each other: --fresh would set the checkpoint aside")
    return path


def train(inputs, trainer, journal) -> None:
    """The training loop: unrolled steps over packs, the optimizer, held-out acceptance, checkpoints."""
    import torch

    from common.dataset.packs import prefetch
    from common.training.batches import global_counts, step_packs
    from common.training.optimizer import GRAD_CLIP, learning_rate
    from common.training.ranks import StopSignal, full_tensor, set_gradient_sync

    s, ranks, stop = trainer.settings, trainer.ranks, StopSignal(trainer.ranks)
    trainer.measure_baselines()
    steps = (step_packs(inputs.order, step, s, ranks) for step in range(trainer.step, inputs.total_steps))
    if inputs.follower:
        steps = inputs.follower.ready(steps, stop)
    with Progress("train", inputs.total_steps, "steps", done=trainer.step, shown=ranks.first) as progress:
        for batch in prefetch(lambda packs: [inputs.packs.load(rows).to(ranks.device) for rows in packs], steps):
            started = time.monotonic()
            counts = global_counts(batch, s.unrolled_steps, ranks)
            results = []
            for pack in batch:
                set_gradient_sync(trainer.module, pack is batch[-1])
                results.append(trainer.module(pack, counts))
                # The loss is the pack's share of the mean over all packs; DDP and FSDP2 average where we need the sum.
                (results[-1].loss * ranks.world).backward()
            norm = full_tensor(torch.nn.utils.clip_grad_norm_(trainer.trained, GRAD_CLIP))
            trainer.check_finite(batch, results, norm)
            for group in trainer.optimizer.param_groups:
                group["lr"] = learning_rate(trainer.step, inputs.total_steps, s)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

            trainer.step += 1
            trainer.tokens += int(ranks.sum(torch.tensor([sum(len(pack.input_ids) for pack in batch)])))
            trainer.seconds += (seconds := time.monotonic() - started)
            journal.log_step(batch, results, counts, norm, seconds, progress)
            last, stopping = trainer.step == inputs.total_steps, stop.asked()
            best = (last or trainer.step % trainer.eval_every == 0) and evaluate(inputs, trainer, journal)
            if best or last or stopping or trainer.checkpoint_due():
                trainer.checkpoint()
            if stopping and not last:
                raise KeyboardInterrupt
    if trainer.step < inputs.total_steps:  # stopped while waiting for the first shards of a disk budget
        raise KeyboardInterrupt


def evaluate(inputs, trainer, journal) -> bool:
    """Measure and report held-out acceptance; True when this step is the best so far."""
    if not inputs.held_out.schedule:
        return False
    started = time.monotonic()
    figures, replies = trainer.measure()
    journal.log("eval", **figures, seconds=round(time.monotonic() - started, 2))
    best = trainer.is_best(figures)
    if trainer.ranks.first:
        k, length = trainer.main_k, figures["walk"][trainer.main_k]["length"] or 0.0
        say(f"  step {trainer.step}: held-out acceptance length {length:.3f} (k={k}), loss {figures['loss']:.3f}")
        journal.write_report(trainer.best_step or trainer.step, replies)
    return best


def finish(inputs, trainer, journal, manifest: Manifest, settings: Settings, checkpoint: Path | None = None) -> None:
    """Export the best checkpoint, or the given one, write the report and the manifest, print the summary."""
    from common.export.model_card import model_card
    from common.export.served_folder import describe, export
    from common.export.speculators_layout import write_speculators
    from common.training.held_out import acceptance_rows

    folder, k = journal.folder, trainer.main_k
    chosen = trainer.load(checkpoint) if checkpoint else trainer.load_best()
    figures, replies = trainer.measure(alone=True)
    served, other = folder / "export", folder / "export-speculators"
    findings = export(served, trainer.draft, inputs.d2t, inputs.t2d, inputs.aux_layers, inputs.text)
    card = model_card(settings.target, str(served), journal.report_facts(chosen), figures, k, findings)
    write_text(served / "README.md", card)
    if settings.serving.export_format == "speculators" or other.exists():  # never two exports of different weights
        write_speculators(other, served, settings.target.model, k)
    journal.write_report(chosen, replies)
    journal.loggers.close()

    names = [
        str(path.relative_to(folder)) for export in (served, other) if export.exists() for path in export.iterdir()
    ]
    for name in (*names, "metrics.jsonl", "report.json", "report.html"):
        manifest.add_file(folder, name)
    manifest.counts = {"steps": trainer.step, "tokens": trainer.tokens, "seconds": trainer.seconds}
    manifest.counts |= {"chosen_step": chosen, "acceptance": figures, "baselines": trainer.baselines}
    manifest.complete = manifest.complete or trainer.step == inputs.total_steps
    manifest.save(folder)

    say(f"04 done: {trainer.step} steps, {trainer.tokens:,} tokens in {trainer.seconds:.0f} s of training")
    files = [("export", f"{served}: {describe(served)}"), ("report", str(folder / "report.html"))]
    table(acceptance_rows(figures, trainer.baselines, k, chosen) + files)


def measure_serving(settings: Settings, folder: Path) -> None:
    """Measure a draft on a running server; adds its figures to report.json and report.html, and prints them."""
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
        with stage_lock(settings.run_dir / f".{DRAFT}-0"):
            if (folder / MANIFEST).exists():
                manifest = Manifest.load(folder, DRAFT)
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
