"""The space of a search: settings with their choices or ranges, from a file or around those of a configuration.

The file of a space holds settings by key. A list is a choice; {low, high, step} or {low, high, log} is a range that
includes both ends; a choice of mappings sets several keys together, under any name. A key that the configuration does
not have is added with Hydra's `++`:

    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: [1, 2, 4]
    actor_rollout_ref.rollout.gpu_memory_utilization: {low: 0.5, high: 0.9, step: 0.1}
    layout:
      - {actor_rollout_ref.actor.megatron.tensor_model_parallel_size: 4, trainer.nnodes: 16}
      - {actor_rollout_ref.actor.megatron.tensor_model_parallel_size: 8, trainer.nnodes: 16}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from post_training.report.run_folder import at
from post_training.user_files import FileError, read_text, read_yaml

if TYPE_CHECKING:
    from optuna.trial import Trial

Settings = Mapping[str, Any]
_RANGE = ("low", "high", "step", "log")


class SpaceError(ValueError):
    """A space cannot be searched; the message is one sentence."""


def overrides(settings: Settings) -> list[str]:
    """Return settings as Hydra overrides; lists and nulls as Hydra writes them."""
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Choice:
    """One of several settings, or groups of settings; `options` hold the same keys each."""

    name: str
    options: tuple[Settings, ...]

    def labels(self) -> list[str | int | float | bool | None]:
        """Return the labels of the options in a study: the value of a single setting, the text of several."""
        alone = [next(iter(option.values())) if len(option) == 1 else [] for option in self.options]
        if all(isinstance(value, str | int | float | bool | None) for value in alone):
            return alone
        return [" ".join(overrides(option)) for option in self.options]

    def suggest(self, trial: Trial) -> Settings:
        labels = self.labels()
        return self.options[labels.index(trial.suggest_categorical(self.name, labels))]

    def first(self) -> Settings:
        return self.options[0]

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the label of the option that a configuration has; None if it has none of them."""
        for label, option in zip(self.labels(), self.options, strict=True):
            if all(at(config, key.lstrip("+")) == value for key, value in option.items()):
                return label
        return None

    def written(self) -> Any:
        alone = all(list(option) == [self.name] for option in self.options)
        return [option[self.name] if alone else dict(option) for option in self.options]


@dataclass(frozen=True)
class Range:
    """A number between two, both included; `step` None for any number. Whole numbers if both ends are."""

    name: str
    low: float
    high: float
    step: float | None = None
    log: bool = False

    def suggest(self, trial: Trial) -> Settings:
        if isinstance(self.low, int) and isinstance(self.high, int):
            return {
                self.name: trial.suggest_int(self.name, self.low, self.high, step=int(self.step or 1), log=self.log)
            }
        value = trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)
        return {self.name: float(f"{value:.6g}")}

    def first(self) -> Settings:
        return {self.name: self.low}

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the value of a configuration; None if it is outside the range."""
        value = at(config, self.name.lstrip("+"))
        return value if isinstance(value, int | float) and self.low <= value <= self.high else None

    def written(self) -> Any:
        kept = {"low": self.low, "high": self.high, "step": self.step, "log": self.log or None}
        return {name: value for name, value in kept.items() if value is not None}


Space = tuple[Choice | Range, ...]


def as_text(space: Space) -> str:
    """Format a space as its file."""
    import yaml

    return yaml.safe_dump(
        {each.name: each.written() for each in space}, sort_keys=False, width=1000, default_flow_style=None
    )


_SPACE_BYTES = 1 << 20


def read_space(path: Path) -> Space:
    """Read a space.

    Raises:
        SpaceError: no such file, or not in the form that this module's docstring describes.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # OmegaConf reads 1e-6 as a number, as a configuration does; plain YAML reads a text.
        read_yaml(path, _SPACE_BYTES)
        content = OmegaConf.to_container(OmegaConf.create(read_text(path, _SPACE_BYTES)))
    except FileError as error:
        raise SpaceError(f"--space {error}.") from error
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise SpaceError(f"--space {path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, Mapping) or not content:
        raise SpaceError(f"--space {path} must contain settings by key, each with a list or {{low, high}}.")
    try:
        return tuple(_parameter(str(name), entry) for name, entry in content.items())
    except SpaceError as error:
        raise SpaceError(f"--space {path}: {error}") from error


def _parameter(name: str, entry: Any) -> Choice | Range:
    if isinstance(entry, Mapping):
        return _range(name, entry)
    if not isinstance(entry, list) or not entry:
        raise SpaceError(f"{name}={entry!r} is invalid. Set it to a list of values, or {{low, high}} of a range.")
    options = tuple(each if isinstance(each, Mapping) else {name: each} for each in entry)
    if len({frozenset(option) for option in options}) > 1:
        raise SpaceError(f"{name} has options with different keys; each must set the same ones.")
    if len({tuple(overrides(option)) for option in options}) < len(options):
        raise SpaceError(f"{name} has an option twice. Remove one of them.")
    return Choice(name, options)


def _range(name: str, entry: Mapping[str, Any]) -> Range:
    if unknown := [key for key in entry if key not in _RANGE]:
        raise SpaceError(f"{name} has {unknown[0]}, but a range takes {', '.join(_RANGE)}.")
    low, high, step, log = (entry.get(key) for key in _RANGE)
    for value in (low, high, 1 if step is None else step):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpaceError(f"{name}={dict(entry)} is invalid. Set low, high and step, if there is one, to numbers.")
    assert low is not None and high is not None
    if not low < high or (step is not None and not 0 < step <= high - low):
        raise SpaceError(f"{name} goes from {low} to {high} by {step}. Set a low below high, and a step that fits.")
    if log and (step is not None or low <= 0):
        raise SpaceError(f"{name} has log, which needs a low above 0 and no step.")
    return Range(name, low, high, step, bool(log))


_NODE = "actor_rollout_ref"
_ACTOR, _REF, _ROLLOUT = f"{_NODE}.actor", f"{_NODE}.ref", f"{_NODE}.rollout"
_MEGATRON = f"{_ACTOR}.megatron"
_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_EP = "expert_model_parallel_size"
_STAGES = f"{_MEGATRON}.override_transformer_config.num_layer_list"
_KWARGS = f"{_NODE}.model.gradient_checkpointing_kwargs.activations_checkpoint"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"
# vLLM's default number of sequences in flight.
_SEQUENCES = 256


def speed_space(config: Mapping[str, Any], layers: int | None) -> Space:
    """Return settings that affect how fast a job is but not what it learns, around those of its configuration.

    Args:
        config: the resolved configuration.
        layers: number of the model's layers; None leaves layouts and recomputation as they are.
    """
    found: list[Choice | Range] = [
        *_micro(config, f"{_ACTOR}.ppo_", f"{_ACTOR}.use_dynamic_bsz"),
        *_micro(config, f"{_REF}.log_prob_", f"{_REF}.log_prob_use_dynamic_bsz"),
    ]
    if not at(config, f"{_ENGINE}.num_gpu_blocks_override"):  # else the cache is as large as it says
        found.append(Range(f"{_ROLLOUT}.gpu_memory_utilization", 0.4, 0.9, 0.1))
    in_flight, there = f"{_ENGINE}.max_num_seqs", "max_num_seqs" in (at(config, _ENGINE) or {})
    found.append(_around(in_flight if there else f"++{in_flight}", at(config, in_flight) or _SEQUENCES, (0.5, 1, 2)))
    if layers is not None and at(config, _MEGATRON):
        found += [*_recomputed(config), *_layouts(config, layers)]
    tensor = at(config, f"{_ROLLOUT}.{_TP}")
    found.append(_around(f"{_ROLLOUT}.{_TP}", tensor, (0.5, 1, 2)))
    return tuple(each for each in found if isinstance(each, Range) or len(each.options) > 1)


def algorithm_space(config: Mapping[str, Any]) -> Space:
    """Return settings that affect what a job learns: learning rate, clip, and the KL term's weight if it has one."""
    scales = [f"{_ACTOR}.optim.lr", *([f"{_ACTOR}.kl_loss_coef"] if at(config, f"{_ACTOR}.use_kl_loss") else [])]
    found = [
        Range(key, float(f"{value / 10:.6g}"), float(f"{value * 10:.6g}"), log=True)
        for key in scales
        if (value := at(config, key)) and value > 0
    ]
    return (*found, Range(f"{_ACTOR}.clip_ratio", 0.1, 0.3, 0.05))


def _around(key: str, value: int, factors: Sequence[float]) -> Choice:
    values = sorted({int(value * factor) for factor in factors if value * factor >= 1})
    return Choice(key, tuple({key: each} for each in values))


def _micro(config: Mapping[str, Any], prefix: str, switch: str) -> list[Choice]:
    """Return the choices of a micro batch, of sequences or of tokens."""
    key = f"{prefix}max_token_len_per_gpu" if at(config, switch) else f"{prefix}micro_batch_size_per_gpu"
    value = at(config, key)
    return [_around(key, value, (0.25, 0.5, 1, 2, 4))] if isinstance(value, int) else []


def _recomputed(config: Mapping[str, Any]) -> list[Range]:
    """Return the range of recomputed layers per stage, if some are recomputed."""
    value = at(config, f"{_KWARGS}_num_layers")
    whole = at(config, f"{_NODE}.model.enable_gradient_checkpointing") and at(config, f"{_KWARGS}_method") == "block"
    return [Range(f"{_KWARGS}_num_layers", 1, value)] if whole and isinstance(value, int) and value > 1 else []


def _layouts(config: Mapping[str, Any], layers: int) -> list[Choice]:
    """Return tensor and pipeline parallelism from half to twice their values, as far as they divide the dies.

    If the configuration sets the layers of each stage, another number of stages gets them as evenly as possible, the
    first ones more: 7 layers on 3 stages are [3, 2, 2]. Expert parallelism stays, or becomes the largest divisor of it
    that also divides the number of replicas.
    """
    tp, pp = at(config, f"{_MEGATRON}.{_TP}"), at(config, f"{_MEGATRON}.{_PP}")
    dies = at(config, "trainer.nnodes") * at(config, "trainer.n_gpus_per_node")
    given, experts = at(config, _STAGES), at(config, f"{_MEGATRON}.{_EP}")
    options = []
    for tensor in sorted({max(1, tp // 2), tp, tp * 2}):
        for stages in sorted({max(1, pp // 2), pp, pp * 2}):
            if dies % (tensor * stages) or stages > layers:
                continue
            option = {f"{_MEGATRON}.{_TP}": tensor, f"{_MEGATRON}.{_PP}": stages}
            if given:
                option[_STAGES] = list(given) if stages == pp else _even(layers, stages)
            if isinstance(experts, int) and experts > 1:
                option[f"{_MEGATRON}.{_EP}"] = gcd(experts, dies // (tensor * stages))
            options.append(option)
    return [Choice("layout", tuple(options))]


def _even(layers: int, stages: int) -> list[int]:
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]
