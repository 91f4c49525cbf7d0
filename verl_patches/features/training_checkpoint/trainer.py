"""Saving and resuming on verl's trainer: the driver's own state, and the order of its workers' work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.step_files import ACTOR, CRITIC
from post_training.hang_detection.progress import file_progress
from post_training.process_context import process_context
from verl_patches.features.training_checkpoint.circumstances import (
    check_circumstances,
    circumstances,
    differences,
)
from verl_patches.features.training_checkpoint.feature import CheckpointSettings
from verl_patches.features.training_checkpoint.kept_states import process_kept_states
from verl_patches.features.training_checkpoint.random_states import (
    driver_random_states,
    restore_driver_random_states,
)
from verl_patches.features.training_checkpoint.retention import score_of, steps_to_delete
from verl_patches.features.training_checkpoint.run_records import take_back_steps
from verl_patches.features.training_checkpoint.step_folders import (
    begin_step,
    complete_step,
    delete_steps,
    newest_step,
    publish_step,
    read_trainer,
    saved_steps,
    scores_of,
    set_aside,
    step_folder,
    step_of,
)

State = Callable[[], dict[str, Any]]
Finish = Callable[[], Any]


@dataclass(frozen=True)
class _Save:
    """A checkpoint that waits to be published.

    Attributes:
        root: the folder of checkpoints.
        step: its step.
        keep: the rules that keep checkpoints.
        finish: waits until the workers have written; None if they have.
    """

    root: Path
    step: int
    keep: CheckpointSettings
    finish: Finish | None


class StepPublisher:
    """Completes and names a checkpoint once the metrics of its step have been written.

    So a resume never lacks metrics, and the driver's own state is that at the end of the step.

    Attributes:
        previous: the step that this process has resumed from or published last.
    """

    def __init__(self) -> None:
        self.previous = 0
        self._waiting: tuple[_Save, State] | None = None
        self._logged: tuple[_Save, dict[str, Any]] | None = None

    def hold(self, root: Path, step: int, state: State, keep: CheckpointSettings, finish: Finish | None = None) -> None:
        """Hold the checkpoint of `step` until its metrics have been logged; then add `state` and publish it.

        Args:
            root: the folder of checkpoints.
            step: the step.
            state: returns the driver's state; called when the metrics have been logged.
            keep: the rules that keep checkpoints.
            finish: waits until the workers have written; if given, the checkpoint is completed and published by this
                class's `finish`, with the state from when the metrics were logged.
        """
        self._waiting = _Save(root, step, keep, finish), state

    def logged(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take note that the metrics of `step` are in their file; publish its checkpoint if the workers are done."""
        if self._waiting is None or self._waiting[0].step != step:
            return
        (save, state), self._waiting = self._waiting, None
        keep = save.keep
        score = score_of(keep.keep_best, metrics)
        if score is None and keep.keep_best.metric:
            print(
                f"warning: step {step} has no {keep.keep_best.metric}, so its checkpoint is not one of the best by "
                "actor_rollout_ref.overlay.checkpoint.keep_best.metric"
            )
        with _rejected_by(save.root):
            # A copy by way of JSON: the driver's own objects in the state change with the next step.
            self._logged = save, json.loads(json.dumps({**state(), "score": score}))
        if save.finish is None:
            self.finish()

    def finish(self) -> None:
        """Publish the checkpoint whose metrics have been logged, if there is one, once the workers have written it.

        Raises:
            CheckpointError: it could not be written, and the one before it stays; a worker's comes wrapped by Ray.
        """
        if self._logged is None:
            return
        (save, state), self._logged = self._logged, None
        root, step, keep = save.root, save.step, save.keep
        if save.finish is not None:
            save.finish()
        with _rejected_by(root):
            complete_step(root, step, state)
            for aside in set_aside(root, self.previous):
                print(f"set aside, from a run that resumed from another step: {aside}")
            publish_step(root, step)
            self.previous = step
            delete_steps(root, steps_to_delete(saved_steps(root), keep, scores_of(root, keep.keep_best.metric)))

    def finishing_first(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `update` to call `finish` first, because it changes tensors that may still be being written."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.finish()
            return update(*arguments, **options)

        return run

    @contextmanager
    def finishing_at_end(self, unreachable: type[Exception]) -> Iterator[None]:
        """Call `finish` after this context, even if it raises; but not after `unreachable`, when no worker answers."""
        try:
            yield
        except unreachable:
            raise
        except Exception:
            try:
                self.finish()
            except Exception as second:  # the run ends with the first exception
                print(f"warning: the last checkpoint could not be completed: {second}")
            raise
        self.finish()


def process_publisher() -> StepPublisher:
    """Return the publisher of this process."""
    return process_context().of(StepPublisher)


def save_step(trainer: Any, keep: CheckpointSettings, in_background: bool = False) -> None:
    """Save the current step of verl's trainer: its workers' state now, its own when the step has been logged.

    Args:
        trainer: verl's trainer.
        keep: the rules that keep checkpoints.
        in_background: the workers only begin to write; `StepPublisher.finish` waits for them.
    """
    process_publisher().finish()
    options, step = trainer.config.trainer, trainer.global_steps
    root = Path(options.default_local_dir)
    with _rejected_by(root):
        partial = begin_step(root, step)
        trainer.actor_rollout_wg.save_checkpoint(str(partial / ACTOR), None, step)
        if _has_critic(trainer):
            trainer.critic_wg.save_checkpoint(str(partial / CRITIC), None, step)
    if not keep.keep_last:
        keep = replace(keep, keep_last=options.get("max_actor_ckpt_to_keep") or 0)
    finish = trainer.actor_rollout_wg.finish_checkpoint if in_background else None
    process_publisher().hold(root, step, lambda: trainer_state(trainer), keep, finish)


def _has_critic(trainer: Any) -> bool:
    """Return whether verl's trainer trains a critic."""
    return getattr(trainer, "use_critic", False)


@contextmanager
def _rejected_by(root: Path) -> Iterator[None]:
    """Turn a failed write within this context into a CheckpointError with one sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"trainer.default_local_dir={root} is invalid: it cannot store a checkpoint ({error.strerror}). "
            "Choose a folder with room"
        ) from error


def trainer_state(trainer: Any) -> dict[str, Any]:
    """Return the driver's own state as JSON values."""
    controller = getattr(trainer, "kl_ctrl_in_reward", None)
    return {
        "step": trainer.global_steps,
        "data": trainer.train_dataloader.state_dict(),
        "data_sha256": data_digests(trainer.config.data.train_files),
        "kl_coefficient": None if controller is None else controller.value,
        "random": driver_random_states(),
        "kept": process_kept_states().read(),
        **circumstances(trainer.config),
    }


def data_digests(files: str | Iterable[str]) -> list[str]:
    """Return the SHA-256 of the training data's files, in their order."""
    listed = [files] if isinstance(files, str) else list(files)
    return [hash_file(Path(file).expanduser(), file_progress).sha256 for file in listed]


def resume_step(trainer: Any, output_dir: str) -> None:
    """Resume from the checkpoint that the configuration asks for; without one, change nothing.

    Other differences of configuration or software since the checkpoint are reported in one warning.

    Raises:
        CheckpointError: the checkpoint cannot be used, or belongs to another model, other data or other batches.
    """
    process_publisher().previous = 0
    folder, skipped = folder_to_resume(trainer.config.trainer)
    for sentence in skipped:
        print(f"skipped: {sentence}")
    if folder is None:
        if trainer.config.trainer.resume_mode == "auto":
            root = trainer.config.trainer.default_local_dir
            print(f"no complete checkpoint in {root}; training begins at step 1")
        return
    state, now = read_trainer(folder), circumstances(trainer.config)
    check_circumstances(folder, state, now)
    files = trainer.config.data.train_files
    if state["data_sha256"] != data_digests(files):
        raise CheckpointError(f"{folder}: was trained on other data than data.train_files={files}. Use the same files")
    if _has_critic(trainer) and not (folder / CRITIC).is_dir():
        raise CheckpointError(
            f"{folder}: was written without a critic, but algorithm.adv_estimator=gae trains one. Set the estimator of "
            "that run, or begin from its weights"
        )
    different = differences(state, now)
    if different:
        print(f"warning: settings have changed since {folder} was written, so steps may differ: {different}")
    trainer.train_dataloader.load_state_dict(state["data"])
    trainer.actor_rollout_wg.load_checkpoint(str(folder / ACTOR), del_local_after_load=False)
    if _has_critic(trainer):
        trainer.critic_wg.load_checkpoint(str(folder / CRITIC), del_local_after_load=False)
    if state["kl_coefficient"] is not None and hasattr(trainer, "kl_ctrl_in_reward"):
        trainer.kl_ctrl_in_reward.value = state["kl_coefficient"]
    if "random" in state:  # a checkpoint of an earlier version has only the above
        restore_driver_random_states(state["random"])
        process_kept_states().restore(state["kept"])
    process_publisher().previous = trainer.global_steps = state["step"]
    if not trainer.config.trainer.get("val_only"):
        # Validation came before step 1; again, it would draw from the rollout's random numbers and log this step twice.
        trainer.config.trainer.val_before_train = False
    take_back_steps(output_dir, state["step"])
    print(f"resuming after step {state['step']} from {folder}")


def kept_in_checkpoint(options: Mapping[str, Any], name: str) -> Any:
    """Return the state under a name of `KeptStates`, for callers that need it before `resume_step` restores it.

    Args:
        options: verl's `trainer`.
        name: of the state.

    Returns:
        The state; None if the run begins at step 1 or the checkpoint has nothing under the name.

    Raises:
        CheckpointError: the requested checkpoint is not complete.
    """
    folder, _ = folder_to_resume(options)
    return None if folder is None else read_trainer(folder).get("kept", {}).get(name)


def folder_to_resume(options: Mapping[str, Any]) -> tuple[Path | None, list[str]]:
    """Return the folder to resume from by `trainer.resume_mode`, and a sentence for each newer, incomplete one.

    The folder is None, the newest complete one, or `trainer.resume_from_path`.
    """
    if options["resume_mode"] == "disable":
        return None, []
    if options["resume_mode"] == "resume_path":
        folder = Path(options["resume_from_path"])
        step_of(folder)
        return folder, []
    root = Path(options["default_local_dir"])
    step, skipped = newest_step(root)
    return None if step is None else step_folder(root, step), skipped
