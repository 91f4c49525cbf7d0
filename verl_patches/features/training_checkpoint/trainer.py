"""What verl's trainer saves and goes on from, beside what its workers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.training_files import ACTOR
from verl_patches.features.training_checkpoint.run_records import take_back_steps
from verl_patches.features.training_checkpoint.step_folders import (
    begin_step,
    complete_step,
    newest_step,
    publish_step,
    read_trainer,
    step_folder,
    step_of,
)


class StepPublisher:
    """A checkpoint gets its name when the metrics of its step have been written, so that no resume lacks them."""

    def __init__(self) -> None:
        self._waiting: tuple[Path, int, int | None] | None = None

    def hold(self, root: Path, step: int, keep: int | None) -> None:
        """Publish the checkpoint of `step` when its metrics have been logged."""
        self._waiting = (root, step, keep)

    def logged(self, step: int) -> None:
        """The metrics of `step` are in their file."""
        if self._waiting is not None and self._waiting[1] == step:
            root, _, keep = self._waiting
            self._waiting = None
            publish_step(root, step, keep)


_publisher = StepPublisher()


def process_publisher() -> StepPublisher:
    """The one publisher of this process."""
    return _publisher


def save_step(trainer: Any) -> None:
    """Save the step that verl's trainer is in: its workers' state, its own, and the manifest."""
    options, step = trainer.config.trainer, trainer.global_steps
    root = Path(options.default_local_dir)
    try:
        partial = begin_step(root, step)
        trainer.actor_rollout_wg.save_checkpoint(str(partial / ACTOR), None, step)
        complete_step(root, step, trainer_state(trainer))
    except OSError as error:
        raise CheckpointError(
            f"trainer.default_local_dir={root} does not take a checkpoint ({error.strerror}); choose a folder with room"
        ) from error
    process_publisher().hold(root, step, options.get("max_actor_ckpt_to_keep"))


def trainer_state(trainer: Any) -> dict[str, Any]:
    """The driver's own state, as JSON holds it."""
    controller = getattr(trainer, "kl_ctrl_in_reward", None)
    return {
        "step": trainer.global_steps,
        "data": trainer.train_dataloader.state_dict(),
        "data_sha256": data_digests(trainer.config.data.train_files),
        "kl_coefficient": None if controller is None else controller.value,
    }


def data_digests(files: str | Iterable[str]) -> list[str]:
    """SHA-256 of the training data's files, in their order."""
    listed = [files] if isinstance(files, str) else list(files)
    return [hash_file(Path(file).expanduser(), lambda _: None).sha256 for file in listed]


def resume_step(trainer: Any, output_dir: str) -> None:
    """Go on from the checkpoint that the configuration asks for; from none, nothing changes.

    Raises CheckpointError for a checkpoint that is asked for and cannot be used, or of other data.
    """
    folder = _asked_for(trainer.config.trainer)
    if folder is None:
        return
    state = read_trainer(folder)
    files = trainer.config.data.train_files
    if state["data_sha256"] != data_digests(files):
        raise CheckpointError(f"{folder}: was trained on other data than data.train_files={files}; give the same files")
    trainer.train_dataloader.load_state_dict(state["data"])
    trainer.actor_rollout_wg.load_checkpoint(str(folder / ACTOR), del_local_after_load=False)
    if state["kl_coefficient"] is not None and hasattr(trainer, "kl_ctrl_in_reward"):
        trainer.kl_ctrl_in_reward.value = state["kl_coefficient"]
    trainer.global_steps = state["step"]
    take_back_steps(output_dir, state["step"])
    print(f"going on after step {state['step']} from {folder}")


def _asked_for(options: Mapping[str, Any]) -> Path | None:
    """The folder of `trainer.resume_mode`: none, the newest complete one, or `trainer.resume_from_path`."""
    if options["resume_mode"] == "disable":
        return None
    if options["resume_mode"] == "resume_path":
        folder = Path(options["resume_from_path"])
        step_of(folder)
        return folder
    root = Path(options["default_local_dir"])
    step, skipped = newest_step(root)
    for sentence in skipped:
        print(f"skipped: {sentence}")
    if step is None:
        print(f"no complete checkpoint in {root}; training begins at step 1")
        return None
    return step_folder(root, step)
