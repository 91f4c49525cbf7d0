"""Entry point: `python -m verl_patches.trainer.main_ppo --config-name rehearsal key=value ...`.

It composes the configuration over verl's own, checks it before anything starts, brings up Ray with the overlay in every
worker, and runs verl's `run_ppo`. Exit codes: 0 done, 1 failed, 2 configuration rejected or a folder of the run in use
by another run, 129 hung up (SIGHUP), 130 interrupted (SIGINT), 131 quit (SIGQUIT), 143 terminated (SIGTERM).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verl_patches.trainer.ray_connection import StartWorkers, connected_ray, no_source

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from post_training.hang_detection.driver import Watcher
    from post_training.masking import Secrets
    from post_training.start_status import Cause
    from verl_patches.trainer.isolated_ray import IsolatedRay

CONFIG_FOLDER = Path(__file__).resolve().parent / "config"
REPOSITORY = Path(__file__).resolve().parents[2]
INTERRUPTED, SIGNALLED = 130, 128
_DESCRIPTION = """
Train with verl and the overlay, after every check has passed.

Example:
    python -m verl_patches.trainer.main_ppo --config-name qwen2_5_0_5b_gsm8k \\
        actor_rollout_ref.model.path=MODEL --check

Exit codes: 0 done; 1 failed; 2 configuration rejected, or a folder of the run is in use; 129 hung up; 130 Ctrl-C;
131 quit; 143 terminated.
"""
# Ctrl-C, and the other signals that ask a process to end.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
_ROLE = "run"  # as the owner of folders; a supervisor and a rehearsal, which start runs, have roles of their own
Action = Literal["run", "check", "print"]


def compose(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration `config_name` over verl's own folder, with Hydra overrides.

    Imports neither torch nor verl. The overlay's files name `overlay_defaults` after verl's file: every key of the
    features that are found, with its default.

    Raises:
        hydra.errors.HydraException: unknown configuration or key; the message names it.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore

    from post_training.overrides import quoted
    from verl_patches.features.settings import overlay_defaults

    ConfigStore.instance().store("overlay_defaults", overlay_defaults(), package="_global_")
    folder = quoted(f"file://{verl_config_folder()}")
    with initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base=None):
        return translated(hydra_compose(config_name, [f"hydra.searchpath=[{folder}]", *overrides]))


def translated(config: DictConfig) -> DictConfig:
    """Translate MindSpeed's options under override_transformer_config into the overlay's keys, in place."""
    from verl_patches.features.mindspeed.options import translate_options

    translate_options(config)
    return config


def verl_config_folder() -> Path:
    """Return verl's folder of configurations, found without importing verl."""
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed in this environment")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def main(arguments: Sequence[str] | None = None, start_workers: StartWorkers = no_source) -> int:
    """Compose, check, run. Returns the exit code. `start_workers` is called right before Ray starts.

    Secrets are masked in everything that this process prints, including the lines of Ray's workers.
    """
    from post_training.command_parser import CommandParser
    from post_training.masking import masked_output

    parser = CommandParser(prog="python -m verl_patches.trainer.main_ppo", description=_DESCRIPTION)
    name = "a file of verl_patches/trainer/config (default: %(default)s)"
    parser.add_argument("--config-name", default="rehearsal", metavar="NAME", help=name)
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    parser.add_argument("--check", action="store_true", help="check everything that a run would check, and exit")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides")
    options = parser.parse_intermixed_args(arguments)
    action: Action = "print" if options.print_config else "check" if options.check else "run"
    with masked_output() as secrets:
        return carry_out(lambda: compose(options.config_name, options.overrides), action, start_workers, secrets)


def carry_out(composed: Callable[[], DictConfig], action: Action, start_workers: StartWorkers, secrets: Secrets) -> int:
    """Compose, check, and run, check only or print; returns the exit code.

    Args:
        composed: composes the configuration; its errors are reported in one sentence.
        action: run; only check; or only print the resolved configuration.
        start_workers: called right before Ray starts.
        secrets: learns the configuration's secrets, to mask them.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from post_training.claimed_dies import DiesInUse
    from post_training.data import DataError
    from post_training.data.inspection import check_configured_files
    from post_training.inherited_environment import EnvironmentRejected, check_inherited
    from post_training.run_lock import FolderInUse
    from verl_patches.features.settings import SettingsError
    from verl_patches.trainer.configuration_checks import ConfigurationError, check_configuration, check_machine
    from verl_patches.trainer.configuration_checks.composition import sentence_of
    from verl_patches.trainer.configuration_checks.images import reads_images

    try:
        config = composed()
        check_configuration(config)
        _fill_null_groups(config)
        _make_paths_absolute(config)
        if action == "print":
            plain = OmegaConf.to_container(config, resolve=True)
            secrets.learn(plain)
            print(OmegaConf.to_yaml(OmegaConf.create(secrets.value(plain))))
            return 0
        check_inherited(os.environ)
        check_machine(config)
        check_configured_files(config.data, reads_images(config.actor_rollout_ref.model.path))
        try:
            _check_free(config)
        except OSError as error:  # another user's folder
            return _reject_folder(config, error)
    except (HydraException, OmegaConfBaseException) as error:
        return reject(sentence_of(error))
    except FolderInUse as error:
        return reject(str(error), "in_use")
    except (ConfigurationError, SettingsError, DataError, EnvironmentRejected, DiesInUse) as error:
        return reject(str(error))
    if action == "check":
        return 0
    secrets.learn(OmegaConf.to_container(config, resolve=True))
    return run(config, start_workers)


def reject(sentence: str, reason: Cause = "bad_configuration") -> int:
    from post_training.start_status import report_status
    from post_training.terminal import escaped

    report_status(phase="ended", exit_reason=reason)
    print(f"error: {escaped(sentence)}", file=sys.stderr)
    return 2


def _fill_null_groups(config: DictConfig) -> None:
    """Replace null groups of the overlay's keys by their defaults, so that config.yaml agrees with the settings."""
    from verl_patches.features.settings import overlay_defaults

    defaults, node = overlay_defaults()["actor_rollout_ref"]["overlay"], config.actor_rollout_ref
    if node.overlay is None:
        node.overlay = defaults
    for name, group in defaults.items():
        if isinstance(group, dict) and node.overlay.get(name) is None:
            node.overlay[name] = group


def _make_paths_absolute(config: DictConfig) -> None:
    """Make paths absolute: workers run in Ray's folders, where a relative path would mean another file."""
    measure, reward = config.actor_rollout_ref.overlay.measure, config.custom_reward_function
    megatron = config.actor_rollout_ref.actor.get("megatron")
    if megatron and megatron.get("load_from_hf"):
        megatron.load_from_hf = os.path.abspath(os.path.expanduser(megatron.load_from_hf))
    if measure.output_dir:
        measure.output_dir = os.path.abspath(measure.output_dir)
    trainer = config.trainer
    trainer.default_local_dir = os.path.abspath(os.path.expanduser(trainer.default_local_dir))
    if trainer.resume_from_path:
        trainer.resume_from_path = os.path.abspath(os.path.expanduser(trainer.resume_from_path))
    if reward.path and not os.path.exists(reward.path) and (REPOSITORY / reward.path).exists():
        reward.path = str(REPOSITORY / reward.path)
    elif reward.path:
        reward.path = os.path.abspath(reward.path)


def run(config: DictConfig, start_workers: StartWorkers = no_source) -> int:
    """Run verl with `config` as the owner of its folders; every process that it started has ended when it returns."""
    from post_training.run_lock import FolderInUse, owning
    from post_training.start_status import report_status
    from post_training.terminal import escaped

    with ExitStack() as stack:
        try:
            owned = stack.enter_context(owning([Path(folder) for folder in _own_folders(config)], _ROLE))
            _write_resolved(config)
        except FolderInUse as error:
            return reject(str(error), "in_use")
        except OSError as error:
            return _reject_folder(config, error)
        report_status(phase="training")
        code, sentence, reason = _carry_out(config, start_workers)
        report_status(phase="ended", exit_reason=reason)
        if sentence:
            print(escaped(sentence), file=sys.stderr)
        if not owned.lost:  # otherwise the files are another run's
            _conclude(config, code, sentence)
        return code


def _reject_folder(config: DictConfig, error: OSError) -> int:
    folder, failed = config.actor_rollout_ref.overlay.measure.output_dir, Path(error.filename or "/")
    key = "actor_rollout_ref.overlay.measure.output_dir"
    if not folder or not (failed.is_relative_to(folder) or Path(folder).is_relative_to(failed)):
        key, folder = "trainer.default_local_dir", config.trainer.default_local_dir
    return reject(f"{key}={folder} is invalid: not writable ({error.strerror}). Choose a writable folder")


def _own_folders(config: DictConfig) -> list[str]:
    """Return the folders that no other run may write meanwhile; checkpoints that are only read may be another run's."""
    checkpoints = config.trainer.default_local_dir if config.trainer.save_freq > 0 else None
    return [*filter(None, [config.actor_rollout_ref.overlay.measure.output_dir, checkpoints])]


def _check_free(config: DictConfig) -> None:
    """Check that no live run owns the folders or dies of this one.

    Raises:
        FolderInUse: another run owns a folder.
        DiesInUse: another run holds a die.
    """
    from post_training.run_lock import FolderLock

    for folder in _own_folders(config):
        FolderLock(Path(folder), _ROLE).check_free()
    with _claimed_dies(config):
        pass


def _claimed_dies(config: DictConfig) -> AbstractContextManager[object]:
    """Claim the dies of a run on this machine; those of another Ray are claimed by whoever started it."""
    from post_training.claimed_dies import claimed_dies
    from verl_patches.trainer.configuration_checks.sizes import number_of_dies

    return claimed_dies(number_of_dies(config)) if config.ray_init.address == "local" else nullcontext()


def _carry_out(config: DictConfig, start_workers: StartWorkers) -> tuple[int, str, Cause | None]:
    """Run verl; returns the exit code, the message for the user, and the cause of the end if it is known."""
    from post_training.claimed_dies import DiesInUse
    from post_training.interrupts import acknowledged
    from post_training.report.run_error import RunError, original
    from verl_patches.trainer.configuration_checks import ConfigurationError, describe_failure
    from verl_patches.trainer.isolated_ray import FolderError

    watcher, sentence = None, "interrupted; stopping all processes of this run"
    first: list[int] = []
    second: list[int] = []
    try:
        with (
            acknowledged(sentence, _ENDING_SIGNALS) as first,
            _claimed_dies(config),
            connected_ray(config, start_workers) as own,
            # Ray installs its own handler while it starts; before that, its processes end with this one.
            acknowledged(sentence, _ENDING_SIGNALS) as second,
            _watching(config) as watcher,
        ):
            _train(config, own)
    except KeyboardInterrupt:
        if watcher is not None and watcher.sentence:
            return 1, f"error: {watcher.sentence}", "hang"
        sentence = "interrupted; all processes of this run have been stopped"
        received = [*second, *first]
        return (SIGNALLED + received[0] if received else INTERRUPTED), sentence, None
    except (ConfigurationError, FolderError, DiesInUse) as error:
        return 2, f"error: {original(error)}", "bad_configuration"
    except RunError as error:
        raised = original(error)
        return 1, f"error: {raised}", raised.reason if isinstance(raised, RunError) else None
    except Exception as error:  # verl and Ray raise anything; the user gets one sentence and the trace above it
        import traceback

        traceback.print_exc()
        if isinstance(error, SurroundingsFailed):
            return 1, f"error: {error}", error.reason
        sentence, reason = describe_failure(error)
        return 1, f"error: {sentence}", reason
    return 0, "", None


def _conclude(config: DictConfig, code: int, sentence: str) -> None:
    """Record how the run ended and write its report.html; a failure here does not change the run's exit code."""
    from post_training.report import ReportError
    from post_training.report.metrics import ENDED
    from post_training.report.run_page import write_page
    from verl_patches.features.measure.run_files import RunFiles
    from verl_patches.features.tracking.backends import Ending
    from verl_patches.features.tracking.run import end_left_run

    folder = config.actor_rollout_ref.overlay.measure.output_dir
    if not folder:
        return
    status: Ending = "finished" if code == 0 else "killed" if code > SIGNALLED else "failed"
    try:
        RunFiles(folder).note(ENDED, status=status, message=sentence.removeprefix("error: "))
        write_page(Path(folder))
    except (OSError, ReportError) as error:
        print(f"warning: {folder} has no report.html: {error}", file=sys.stderr)
    if status != "finished":
        try:
            end_left_run(Path(folder), status)
        except Exception as error:  # a tracker's client raises anything
            print(f"warning: MLflow still shows the run as running: {error}", file=sys.stderr)


class SurroundingsFailed(RuntimeError):
    """The run failed because of its surroundings: a full disk, or Ray. The message is one sentence."""

    def __init__(self, sentence: str, reason: Cause) -> None:
        super().__init__(sentence)
        self.reason = reason


def _train(config: DictConfig, own: IsolatedRay | None) -> None:
    """Run verl's `run_ppo`.

    Raises:
        SurroundingsFailed: it failed, and a disk is full, the isolated local Ray has ended, or another Ray lost a node.
    """
    import ray
    from verl.trainer.main_ppo import run_ppo

    from post_training.disks import describe_full_disk
    from verl_patches.trainer.ray_nodes import RayNodes

    nodes = None if own else RayNodes(ray.nodes)
    try:
        with own.reporting_end(lambda clause: _report_ray_end(config, clause)) if own else nullcontext():
            run_ppo(config)
    except Exception as error:
        full_disk = describe_full_disk(_written_folders(config))
        if full_disk:
            raise SurroundingsFailed(full_disk, "full_disk") from error
        ray_end = own.describe_end() if own else nodes.describe_loss(error) if nodes else None
        if ray_end:
            raise SurroundingsFailed(ray_end, "ray_died") from error
        raise


def _report_ray_end(config: DictConfig, clause: str) -> None:
    from post_training.report.faults import RAY_ENDED
    from post_training.report.metrics import read_records
    from verl_patches.features.measure.run_files import RunFiles

    print(f"warning: {clause}", file=sys.stderr, flush=True)
    folder = config.actor_rollout_ref.overlay.measure.output_dir
    if folder:
        logged = [record.step for record in read_records(Path(folder) / "metrics.jsonl")]
        # Recorded for the step in progress, so that a run that resumes from before it does not keep the fault.
        RunFiles(folder).fault(RAY_ENDED, clause, max(logged, default=0) + 1)


def _written_folders(config: DictConfig) -> list[str]:
    folders = [config.actor_rollout_ref.overlay.measure.output_dir, config.trainer.default_local_dir]
    return [*filter(None, folders), tempfile.gettempdir()]


def _watching(config: DictConfig) -> AbstractContextManager[Watcher]:
    """Report workers that stop answering, and interrupt the run for them, within this context."""
    from post_training.hang_detection.driver import watching
    from verl_patches.features.measure.run_files import RunFiles
    from verl_patches.features.settings import OverlaySettings
    from verl_patches.trainer.configuration_checks.sizes import number_of_dies

    chosen = OverlaySettings.from_config(config.actor_rollout_ref)
    files, isolated_ray = RunFiles(chosen.measure.output_dir), config.ray_init.address == "local"
    return watching(chosen.watch, number_of_dies(config), files, isolated_ray)


def _write_resolved(config: DictConfig) -> None:
    """Write `config.yaml` into the output folder, references resolved and secrets masked, and the model's config.json.

    The latter is called `model.json`.
    """
    from omegaconf import OmegaConf

    from post_training.masking import masked

    folder = config.actor_rollout_ref.overlay.measure.output_dir
    if folder:
        os.makedirs(folder, exist_ok=True)
        plain = masked(OmegaConf.to_container(config, resolve=True))
        OmegaConf.save(OmegaConf.create(plain), os.path.join(folder, "config.yaml"))
        model = Path(config.actor_rollout_ref.model.path).expanduser() / "config.json"
        if model.is_file():
            shutil.copyfile(model, os.path.join(folder, "model.json"))


if __name__ == "__main__":
    sys.exit(main())
