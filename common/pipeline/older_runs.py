"""Fingerprints of version 0.1 in today's form: renamed settings, and settings that have become constants."""

from common.pipeline.errors import UserError

VERSION = "0.1"
# Settings of version 0.1 that have become constants, with the values of the constants.
CONSTANTS = {
    "dataset.split_seed": 0,
    "dataset.min_supervised": 2,
    "dataset.max_tokens": 0,
    "dataset.drop_cut": False,
    "dataset.min_reasoning_share": 0.0,
    "dataset.source_pattern": "",
    "draft.norm_before_residual": False,
    "draft.norm_before_fc": False,
    "train.warmup_share": 0.05,
    "train.weight_decay": 0.0,
    "train.grad_clip": 1.0,
    "train.step_weights": [],
    "train.hard_label_share": 0.0,
    "train.train_embedding": False,
    "train.train_head": True,
    "train.mask_outside_vocab": True,
    "train.fc_init": "identity",
}


def in_todays_keys(fingerprint: dict, where: object) -> dict:
    """The fingerprint with today's keys; raises UserError for a value that this version has no setting for."""
    today = {key: value for key, value in fingerprint.items() if key not in CONSTANTS}
    lost = [f"{key} = {fingerprint[key]!r}" for key, value in CONSTANTS.items() if fingerprint.get(key, value) != value]
    if "draft.fc_norm" in today:
        norms = today.pop("draft.fc_norm"), today.pop("draft.norm_output")
        today["draft.eagle"] = {(True, True): "3.1", (False, False): "3"}.get(norms)
        if today["draft.eagle"] is None:
            lost.append(f"draft.fc_norm = {norms[0]}, draft.norm_output = {norms[1]}")
    if "dataset.pack_tokens" in today:  # it limited both the samples and the packs
        today["dataset.sample_tokens"] = today.pop("dataset.pack_tokens")
        if "train.seed" in today:
            today.setdefault("train.pack_tokens", today["dataset.sample_tokens"])
    if lost:
        raise UserError(
            f"{where} was made by version {VERSION} with {', '.join(lost)}, which this version has no setting for; "
            f"finish it with version {VERSION}, or use another --run-dir or --fresh"
        )
    return today
