"""Read `rope_scaling` of a config.json as training and rollout do, and check that they rotate by the same angles.

transformers, vLLM and Megatron each implement every kind of scaling themselves and disagree on some values.
A `Rotation` holds the values that determine the angles and their amplitude; equal rotations have equal tables of cosine
and sine.

Sources: transformers' modeling_rope_utils.py, vLLM's rotary_embedding.py and vLLM-Ascend's, and for YaRN
https://arxiv.org/abs/2309.00071: the attention factor is 0.1 ln(s) + 1 of the configured factor s (equation 22).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MULTIMODAL = ("qwen2_vl", "qwen2_5_vl")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class UnsupportedScaling(ValueError):
    """A scaling that one side cannot compute. The message says why and what to change, without the key's name."""


@dataclass(frozen=True)
class Rotation:
    """The values that determine the rotary angles.

    Attributes:
        kind: The kind of scaling.
        base: `rope_theta`; None means the default of the model's class in transformers, which both sides read.
        numbers: Parameters of the kind, by the names of YaRN, Llama 3 or linear scaling.
        amplitude: Factor on cosine and sine.
    """

    kind: str
    base: float | None
    numbers: tuple[tuple[str, float], ...] = ()
    amplitude: float = 1.0


def kind_of(scaling: Mapping[str, Any]) -> str:
    """Return the kind that `rope_scaling` names; transformers' old names become the present ones.

    Raises:
        UnsupportedScaling: No kind, or two of them.
    """
    kinds = {scaling[name] for name in ("rope_type", "type") if scaling.get(name)}
    if len(kinds) != 1:
        named = " and ".join(sorted(map(str, kinds))) or "none"
        raise UnsupportedScaling(f"rope_type and type name {named}. Set rope_type to one kind, such as yarn")
    kind = str(kinds.pop())
    return {"su": "longrope", "mrope": "default"}.get(kind, kind)


def by_transformers(model: Mapping[str, Any]) -> Rotation:
    """Return the rotation of transformers' models, which FSDP trains.

    Args:
        model: The values of a config.json.

    Raises:
        UnsupportedScaling: transformers has no such scaling, or one that depends on the lengths of a batch.
    """
    scaling, base = model.get("rope_scaling") or {}, model.get("rope_theta")
    if not scaling:
        return Rotation("default", base)
    kind = kind_of(scaling)
    if kind == "yarn":
        return _yarn_of_transformers(scaling, base, model.get("max_position_embeddings"))
    if kind == "dynamic":
        # Frequencies follow the longest sequence of a batch beyond max_position_embeddings, and are plain up to there.
        return Rotation("default", base)
    return _common(kind, scaling, base, model)


def by_vllm(model: Mapping[str, Any]) -> Rotation:
    """Return the rotation of vLLM's models, which generate.

    Args:
        model: The values of a config.json.

    Raises:
        UnsupportedScaling: vLLM has no such scaling, or one that depends on the lengths of a batch.
    """
    scaling, base = model.get("rope_scaling") or {}, model.get("rope_theta")
    if not scaling:
        return Rotation("default", base)
    kind = kind_of(scaling)
    if _is_deepseek(model):  # vLLM takes every scaling of these models for DeepSeek's YaRN.
        return _yarn_of_deepseek(scaling, base)
    if kind == "yarn":
        factor = _number(scaling, "factor")
        attention = _temperature(factor) * float(scaling.get("attn_factor", 1))
        return _yarn(scaling, base, factor, attention)
    if kind == "dynamic" and _number(scaling, "factor") != 1:
        return Rotation("dynamic", base, (("factor", _number(scaling, "factor")),))
    return _common("default" if kind == "dynamic" else kind, scaling, base, model)


def by_megatron(model: Mapping[str, Any], kinds: frozenset[str]) -> Rotation:
    """Return the rotation of Megatron's models.

    Args:
        model: The values of a config.json.
        kinds: The kinds of scaling that the builder of the model's family has.

    Raises:
        UnsupportedScaling: The builder does not have this scaling.
    """
    scaling, base = model.get("rope_scaling") or {}, model.get("rope_theta")
    kind = kind_of(scaling) if scaling else "default"
    # verl's builder reads a factor of every scaling that is there, and a plain one has none.
    if kind not in kinds or (scaling and kind == "default"):
        known = " or ".join(sorted(kinds - {"default"}))
        remedy = f"Set rope_scaling to null, or to {known} scaling" if known else "Set rope_scaling to null"
        raise UnsupportedScaling(f"Megatron's model of this family has no {kind} scaling. {remedy} in config.json")
    if kind == "yarn":
        return _yarn_of_deepseek({**scaling, "attn_factor": 1, "extrapolation_factor": 1}, base)
    return _common(kind, scaling, base, model) if scaling else Rotation("default", base)


def difference(trained: Rotation, served: Rotation) -> tuple[str, Any, Any] | None:
    """Return the first value in which two rotations differ, with both values; None if they agree."""
    if trained.kind != served.kind:
        return "rope_type", trained.kind, served.kind
    if trained.base != served.base:
        return "rope_theta", trained.base, served.base
    numbers, others = dict(trained.numbers), dict(served.numbers)
    for name in numbers:
        if not math.isclose(numbers[name], others[name], rel_tol=1e-6):
            return name, numbers[name], others[name]
    if not math.isclose(trained.amplitude, served.amplitude, rel_tol=1e-6):
        return "attention factor", round(trained.amplitude, 4), round(served.amplitude, 4)
    return None


def _is_deepseek(model: Mapping[str, Any]) -> bool:
    return str(next(iter(model.get("architectures") or ()), model.get("model_type", ""))).lower().startswith("deepseek")


def _number(scaling: Mapping[str, Any], name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedScaling(
            f"{name}={value} is invalid: not a positive number. Set it as in the published config.json"
        )
    return float(value)


def _temperature(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's attention factor with DeepSeek's coefficient."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def _yarn(scaling: Mapping[str, Any], base: float | None, factor: float, amplitude: float) -> Rotation:
    numbers = (
        ("factor", factor),
        ("original_max_position_embeddings", _number(scaling, "original_max_position_embeddings")),
        ("beta_fast", float(scaling.get("beta_fast") or 32)),
        ("beta_slow", float(scaling.get("beta_slow") or 1)),
        ("extrapolation_factor", float(scaling.get("extrapolation_factor", 1))),
    )
    return Rotation("yarn", base, numbers, amplitude)


def _yarn_of_transformers(scaling: Mapping[str, Any], base: float | None, longest: Any) -> Rotation:
    """Return YaRN as in transformers, whose factor is the ratio of the two context lengths; it ignores `factor`."""
    original = _number(scaling, "original_max_position_embeddings")
    factor = _number({"max_position_embeddings": longest}, "max_position_embeddings") / original
    attention, first, second = (scaling.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention is None:
        attention = _temperature(factor)
        if first and second:
            attention = _temperature(factor, first) / _temperature(factor, second)
    return _yarn({**scaling, "extrapolation_factor": 1}, base, factor, float(attention))


def _yarn_of_deepseek(scaling: Mapping[str, Any], base: float | None) -> Rotation:
    """Return DeepSeek's own YaRN: two coefficients scale cosine and sine by the ratio of their attention factors."""
    factor = _number(scaling, "factor")
    ratio = _temperature(factor, float(scaling.get("mscale", 1))) / _temperature(
        factor, float(scaling.get("mscale_all_dim", 0))
    )
    return _yarn(scaling, base, factor, ratio * float(scaling.get("attn_factor", 1)))


def _common(kind: str, scaling: Mapping[str, Any], base: float | None, model: Mapping[str, Any]) -> Rotation:
    """Return a rotation that all implementations compute alike. Raises UnsupportedScaling for other kinds."""
    if kind == "default":
        if "mrope_section" in scaling and model.get("model_type") not in _MULTIMODAL:
            raise UnsupportedScaling(
                "mrope_section is only for models with images. Set rope_scaling to null in config.json"
            )
        return Rotation(kind, base)
    if kind == "linear":
        return Rotation(kind, base, (("factor", _number(scaling, "factor")),))
    if kind == "llama3":
        return Rotation(kind, base, tuple((name, _number(scaling, name)) for name in _LLAMA3))
    raise UnsupportedScaling(
        f"training and rollout compute {kind} scaling differently. Set rope_scaling in config.json to null, or to "
        "linear, llama3 or yarn scaling"
    )
