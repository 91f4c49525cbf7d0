"""The circumstances of a checkpoint (configuration, model and software), and which of them may differ in a resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from overlay.pins import Pins
from post_training.checkpoint.files import CheckpointError
from post_training.masking import masked

_BATCHES = (
    "data.train_batch_size",
    "data.gen_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
)
"""Keys that a run must not change: they define a step, and with it the place in data and schedule."""
_OF_THIS_START = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.overlay.checkpoint.",
    "actor_rollout_ref.overlay.measure.",
    "actor_rollout_ref.overlay.watch.",
    "data.train_files",
    "data.val_files",
    "ray_init.",
    "trainer.default_local_dir",
    "trainer.max_",
    "trainer.resume_",
    "trainer.save_freq",
    "trainer.val_before_train",
)
"""Prefixes of keys that may differ between two starts of a run: folders, records, and values that are checked below."""
_NOT_THE_MODEL = ("_name_or_path", "num_nextn_predict_layers", "quantization_config", "torch_dtype",
                  "transformers_version", "use_cache")  # fmt: skip
_SHOWN = 4
_PYTHON_ROOT = Path(__file__).resolve().parents[3]


def circumstances(config: Any) -> dict[str, Any]:
    """Return the circumstances to keep in a checkpoint, as JSON values; secrets are masked.

    `check_circumstances` and `differences` compare them.

    Args:
        config: verl's configuration, an OmegaConf node.
    """
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(config, resolve=True)
    folder = OmegaConf.select(config, "actor_rollout_ref.model.path", default=None)
    return {"configuration": masked(values), "model": _model(folder), "software": software()}


def check_circumstances(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that the checkpoint in `folder` belongs to this run's model, and that its steps had the same batches.

    Raises:
        CheckpointError: the model or a key in `_BATCHES` differs.
    """
    model, given = before.get("model") or {}, now["model"] or {}
    for key in sorted({*model, *given} - set(_NOT_THE_MODEL)) if model and given else ():
        if model.get(key) != given.get(key):
            raise CheckpointError(
                f"{folder}: was trained with a model whose config.json has {key}={model.get(key)}, but "
                f"actor_rollout_ref.model.path has {given.get(key)}. Set it to the trained model"
            )
    then, here = (dict(_leaves(each.get("configuration") or {})) for each in (before, now))
    for key in _BATCHES if then else ():
        if then.get(key) != here.get(key):
            raise CheckpointError(
                f"{folder}: was trained with {key}={then.get(key)}, but this run has {here.get(key)}, so its steps "
                f"differ. Set {key}={then.get(key)}"
            )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe in one line the other differences since the checkpoint was written; empty if there are none."""
    found = []
    for part in ("configuration", "software"):
        then, here = (dict(_leaves(each.get(part) or {})) for each in (before, now))
        for key in sorted({*then, *here}) if then else ():
            if then.get(key) != here.get(key) and not key.startswith(_OF_THIS_START):
                found.append(f"{key} was {then.get(key)} and is {here.get(key)}")
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


@cache
def software() -> dict[str, str]:
    """Return the versions of installed upstreams by name, and digests of the overlay's code and fingerprints."""
    pins = Pins.read()
    folders = [_PYTHON_ROOT / name for name in ("overlay", "post_training", *pins.patch_packages())]
    code = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        code.update(f"{file.relative_to(_PYTHON_ROOT)}\0".encode() + file.read_bytes())
    lock = (_PYTHON_ROOT / "overlay" / "fingerprints.lock.json").read_bytes()
    upstreams = {upstream.name: upstream.installed() for upstream in pins.upstreams}
    return upstreams | {"overlay": code.hexdigest()[:16], "fingerprints": hashlib.sha256(lock).hexdigest()[:16]}


def _model(folder: str | None) -> dict[str, Any] | None:
    file = Path(folder or "").expanduser() / "config.json"
    try:
        return json.loads(file.read_text()) if folder else None
    except (OSError, ValueError):
        return None


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
