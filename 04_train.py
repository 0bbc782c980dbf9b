"""Stage 04: train the EAGLE-3 draft, measure its acceptance on held-out replies, export what vLLM and SGLang load.

    python 04_train.py --config configs/kimi-k2.5.toml
    torchrun --nproc-per-node 8 04_train.py --config configs/kimi-k2.5.toml
    python 04_train.py --config configs/demo.toml --epochs 3

Reads RUN/03_dataset and the shards of RUN/02_hidden; writes RUN/04_draft: checkpoints, metrics.jsonl, report.html and
export/, the folder to serve. What is exported is the checkpoint with the best held-out acceptance length.
Ctrl-C and SIGTERM checkpoint first; the same command goes on, to the same losses as an unbroken run.
"""

import os
import time
from pathlib import Path

from common.command_line import Settings, load_settings
from common.errors import UserError, guarded
from common.progress import Progress, say, table
from common.storage import Manifest, open_stage, stage_lock

STAGE, INPUT, STATES = "04_draft", "03_dataset", "02_hidden"


def main() -> None:
    settings = load_settings(None, __doc__, ("target", "draft", "train"))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    folder, source = settings.run_dir / STAGE, settings.run_dir / INPUT
    dataset = Manifest.load(source, INPUT)
    bad = dataset.verify(source)
    if bad or not dataset.complete:
        raise UserError(f"{source}{f'/{bad[0]} is not what 03 wrote' if bad else ' is not complete'}; rerun 03")

    from common.training import start_ranks
    from common.training_run import TrainingRun

    ranks = start_ranks(settings.train.device)
    run = TrainingRun(settings, dataset, source, settings.run_dir / STATES, ranks)
    if ranks.first:
        say(f"04 train: {source} -> {folder}" + " (dry run)" * settings.dry_run)
        table(run.plan())
    if settings.dry_run:
        return
    with stage_lock(settings.run_dir / f".{STAGE}-{ranks.rank}"):
        fingerprint = dataset.fingerprint | settings.fingerprint()
        manifest = None
        if ranks.first:
            manifest = open_stage(folder, STAGE, fingerprint, settings.as_dict(), settings.fresh)
        ranks.wait()  # until the folder is the one that all of them shall read
        run.open(folder)
        if run.step < run.total_steps:
            train(run)
        if ranks.first:
            finish(run, folder, manifest, settings)


def train(run) -> None:
    """The training loop: unrolled steps over packs, AdamW, held-out acceptance, checkpoints."""
    import torch

    from common.training import StopSignal, global_counts, learning_rate, prefetched, step_packs

    s, ranks, stop = run.settings.train, run.ranks, StopSignal(run.ranks)
    if not run.baselines:
        run.measure_baselines()
    wanted = (step_packs(run.order, step, s, ranks) for step in range(run.step, run.total_steps))
    with Progress("train", run.total_steps, "steps", done=run.step) as progress:
        for batch in prefetched(run.packs, wanted, ranks.device):
            started = time.monotonic()
            counts = global_counts(batch, s.unrolled_steps, ranks)
            results = []
            for pack in batch:
                results.append(run.module(pack, counts))
                # The loss is this pack's share of the mean over all ranks' packs; DDP averages where we need the sum.
                (results[-1].loss * ranks.world).backward()
            norm = torch.nn.utils.clip_grad_norm_(run.trained, s.grad_clip)
            run.check_finite(batch, results, norm)
            for group in run.optimizer.param_groups:
                group["lr"] = learning_rate(run.step, run.total_steps, s)
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)

            run.step += 1
            run.tokens += int(ranks.sum(torch.tensor([sum(len(pack.input_ids) for pack in batch)])))
            run.log_step(results, counts, norm, time.monotonic() - started, progress)
            last, stopping = run.step == run.total_steps, stop.asked()
            best = (last or run.step % run.eval_every == 0) and run.evaluate()
            if best or last or stopping or run.step % run.checkpoint_every == 0:
                run.checkpoint()
            if stopping and not last:
                raise KeyboardInterrupt


def finish(run, folder: Path, manifest: Manifest, settings: Settings) -> None:
    """Export the best checkpoint, write the report and the manifest, print the summary."""
    from common.evaluation import sample_views
    from common.export import describe, export
    from common.protocol import load_protocol
    from common.report import write_report

    chosen = run.load_best()
    export(folder / "export", run.draft, run.d2t, run.t2d, run.aux_layers, run.text)
    figures, replies = run.measure()
    samples = sample_views(run.held_out, replies, load_protocol(settings.target), int(run.main_k), 3)
    write_report(folder / "report.html", run.report_facts(chosen), run.metrics(), samples)

    def length(of: dict) -> str:
        value = of.get("walk", {}).get(run.main_k, {}).get("length")
        return f"{value:.3f}" if value else "-"

    for name in ("export/config.json", "export/model.safetensors", "metrics.jsonl", "report.html"):
        manifest.add_file(folder, name)
    manifest.counts = {"steps": run.step, "tokens": run.tokens, "seconds": run.seconds, "chosen_step": chosen}
    manifest.counts |= {"acceptance": figures, "baselines": run.baselines}
    manifest.complete = True
    manifest.save(folder)
    say(f"04 done: {run.step} steps, {run.tokens:,} tokens in {run.seconds:.0f} s of training")
    table(
        [
            (f"acceptance length, k={run.main_k}", f"{length(figures)} at step {chosen}, on held-out replies"),
            ("untrained draft", length(run.baselines.get("untrained", {}))),
            ("bigram floor", length(run.baselines.get("bigram", {}))),
            ("k = 1..", "  ".join(f"{k}: {w['length']:.3f}" for k, w in figures["walk"].items() if w["length"])),
            ("export", f"{folder / 'export'}: {describe(folder / 'export')}"),
            ("report", str(folder / "report.html")),
        ]
    )


if __name__ == "__main__":
    guarded(main)
