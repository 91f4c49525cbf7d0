"""A step's seconds on paper: modelled from a job's sizes, with constants fitted on some published rows.

Nothing here was measured by this project. A constant is fitted on a row of `report.published`, or given by a source;
the other published figures are predicted, and a test holds every prediction within 10 % (`published_checks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import log2
from typing import Any, Literal

from post_training.models.families import sizes_of
from post_training.models.sizes import ModelSizes
from post_training.report.flops import FORWARD_AND_BACKWARD, PEAK, forward_flops
from post_training.report.published import CARDS, DEEPSEEK_V3, RANDOM_WEIGHTS, TRUE_WEIGHTS

Agreements = Literal["gloo", "hccl"]
STAGES = ("rollout", "ref", "reward", "update", "reshard", "rest")
BFLOAT16 = 2
PUBLISHED_LONGEST = 3072
DIE_BYTES_A_SECOND = 1.6e12
"""Memory bandwidth of one of a card's two dies: The Register, 29 July 2025, "Huawei's Ascend P910C"."""
# Of the recipe's document (`report.published` names it).
AGREEMENT_S: Mapping[Agreements, float] = {"gloo": 0.014, "hccl": 0.003}
"""One agreement between 128 data-parallel ranks, section 6.6.3."""
SKEW_S = {"ref": (57.0, 1.0), "update": (73.0, 5.0)}
"""Between the first start of a rank and the last: data through the driver, and from die to die; section 3.3."""
LADDER_MS = {"transpose and cumsum": 9.0, "streams": 6.0, "exchange and KV cache NZ": 3.0}
"""What each optimization takes from a decode step: sections 6.5.3, 6.2, and 6.3 with 6.4 (more than 2, and 1)."""


@dataclass(frozen=True)
class Step:
    """What decides the time of a step.

    prompt_tokens, response_tokens: means of a sequence. longest: decode steps. engine_sequences: that a rollout rank
    (tp dies) decodes at a time, at most. stage_layers, recomputed: layers of the largest pipeline stage, and those of
    them that are recomputed. balanced: every expert gets as many tokens. between_dies: prompts and log-probs go from
    die to die. agreements: the back-end of agreements between rollout ranks; a_forward: how many a decode step has.
    """

    model: Mapping[str, Any]
    dies: int
    sequences: int
    prompt_tokens: float
    response_tokens: float
    longest: int
    rollout_tp: int = 2
    rollout_ep: int = 256
    engine_sequences: int = 64
    pp: int = 8
    dp: int = 8
    micro: int = 1
    stage_layers: int = 8
    recomputed: int = 0
    balanced: bool = True
    between_dies: bool = True
    agreements: Agreements = "hccl"
    a_forward: float = 2.0


def published_step(true_weights: bool) -> Step:
    """The conditions of one of the two published rows."""
    row = TRUE_WEIGHTS if true_weights else RANDOM_WEIGHTS
    figures = row.figures
    random = Step(
        model=DEEPSEEK_V3,
        dies=2 * CARDS,
        sequences=figures.sequences,
        prompt_tokens=figures.prompt_tokens,
        response_tokens=figures.response_tokens,
        longest=PUBLISHED_LONGEST,
    )
    if not true_weights:
        return random
    return replace(random, rollout_ep=128, recomputed=4, balanced=False, between_dies=False, agreements="gloo")


def step_seconds(step: Step) -> dict[str, float]:
    """Modelled seconds of each stage.

    Raises:
        ValueError: a model without a formula.
    """
    fitted = _fitted()
    sequences = step.sequences / fitted.sequences
    return {
        "rollout": _waves(step) * step.longest * _decode_step(step),
        "ref": _forward(step) / _rate("ref", step) + _skew("ref", step),
        "reward": RANDOM_WEIGHTS.figures.seconds["reward"] * sequences,  # type: ignore[operator]  # published
        "update": _update_flops(step) / _rate("update", step) + _skew("update", step),
        "reshard": fitted.reshard * _weight_share(step),
        "rest": (fitted.rest_between_dies if step.between_dies else fitted.rest) * sequences,
    }


@dataclass(frozen=True)
class _Constants:
    """host: seconds of a decode step that no byte explains. ref, update: FLOPs a second and die. imbalance: how much
    longer a stage takes where experts are not balanced. rest: seconds of offload, loading and verl's own work."""

    sequences: int
    host: float
    ref: float
    update: float
    imbalance: Mapping[str, float]
    reshard: float
    rest: float
    rest_between_dies: float


@cache
def _fitted() -> _Constants:
    """Fitted on the row with random weights; imbalance, and the rest without data from die to die, on the other."""
    random, true = published_step(False), published_step(True)
    spent, loaded = RANDOM_WEIGHTS.figures.seconds, TRUE_WEIGHTS.figures.seconds

    def of(seconds: Mapping[str, float | None], stage: str) -> float:
        return seconds[stage] or 0.0

    host = of(spent, "rollout") / random.longest - _read(random) - _agreement(random)
    ref = _forward(random) / (of(spent, "ref") - _skew("ref", random))
    update = _update_flops(random) / (of(spent, "update") - _skew("update", random))
    return _Constants(
        sequences=random.sequences,
        host=host,
        ref=ref,
        update=update,
        imbalance={
            "ref": (of(loaded, "ref") - _skew("ref", true)) * ref / _forward(true),
            "update": (of(loaded, "update") - _skew("update", true)) * update / _update_flops(true),
        },
        reshard=of(spent, "reshard"),
        rest=of(loaded, "rest") + of(loaded, "adv"),
        rest_between_dies=of(spent, "rest") + of(spent, "adv"),
    )


def _skew(stage: str, step: Step) -> float:
    """The driver serves ranks one after the other, so the skew grows with their number."""
    driver, dies = SKEW_S[stage]
    return (dies if step.between_dies else driver) * step.dies / (2 * CARDS)


def _rate(stage: str, step: Step) -> float:
    fitted = _fitted()
    return getattr(fitted, stage) / (1.0 if step.balanced else fitted.imbalance[stage])


def _forward(step: Step) -> float:
    """FLOPs of one forward of the whole batch, of one die, with the pipeline's bubble."""
    every = step.sequences * forward_flops(step.model, step.prompt_tokens + step.response_tokens)
    batches = max(1.0, step.sequences / (step.dp * step.micro))
    return every / step.dies * (batches + step.pp - 1) / batches


def _update_flops(step: Step) -> float:
    """A recomputed layer runs its forward once more."""
    return _forward(step) * (FORWARD_AND_BACKWARD + min(1.0, step.recomputed / step.stage_layers))


def _rollout_ranks(step: Step) -> float:
    return step.dies / step.rollout_tp


def _running(step: Step) -> float:
    return min(float(step.engine_sequences), step.sequences / _rollout_ranks(step))


def _waves(step: Step) -> float:
    """How often an engine's places are filled."""
    return max(1.0, step.sequences / _rollout_ranks(step) / step.engine_sequences)


def _decode_step(step: Step) -> float:
    return _fitted().host + _read(step) + _agreement(step)


def _read(step: Step) -> float:
    """Seconds in which a die reads its weights and the cache of half the longest answer, once each."""
    sizes = sizes_of(step.model)
    experts = _expert_weights(sizes) / step.rollout_ep
    others = (_weights(sizes) - _expert_weights(sizes)) / step.rollout_tp
    context = step.prompt_tokens + step.longest / 2
    cached = _running(step) * context * sizes.cache(step.rollout_tp) * sizes.layers
    return (experts + others + cached) * BFLOAT16 / DIE_BYTES_A_SECOND


def _agreement(step: Step) -> float:
    """Published for 128 ranks. Over gloo it grows with the logarithm of the ranks (section 6.6.2), over HCCL not."""
    ranks = max(1.0, step.dies / step.rollout_tp * min(1.0, step.rollout_ep / step.dies))
    if ranks == 1:
        return 0.0
    growth = log2(ranks) / log2(CARDS) if step.agreements == "gloo" else 1.0
    return step.a_forward * AGREEMENT_S[step.agreements] * growth


def _expert_weights(sizes: ModelSizes) -> int:
    return (sizes.layers - sizes.dense_layers) * sizes.experts * 3 * sizes.hidden * sizes.expert_width


def _weights(sizes: ModelSizes) -> int:
    """Elements of the model's matrices: those that a token meets, and the experts that it does not go to."""
    layers = sizes.layers - sizes.dense_layers
    met = layers * 3 * sizes.hidden * sizes.expert_width * sizes.experts_per_token
    return sizes.weights_met - met + _expert_weights(sizes)


def _weight_share(step: Step) -> float:
    """Weights of a die, against those of the published job."""
    return _weights(sizes_of(step.model)) / _weights(sizes_of(DEEPSEEK_V3)) * 2 * CARDS / step.dies


@dataclass(frozen=True)
class Check:
    """A published figure that no constant was fitted on, and what the model says."""

    name: str
    published: float
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.published - 1


def published_checks() -> list[Check]:
    """All predictions of published figures: seconds, and tokens a second and card where the name says so."""
    random, true = published_step(False), published_step(True)
    through_driver = replace(random, between_dies=False)
    slow, fast = step_seconds(true), step_seconds(random)
    driver = step_seconds(through_driver) | {"rest": fast["rest"]}
    eight = sum(step_seconds(replace(true, recomputed=8)).values())
    return [
        *_ladder(),
        Check("rollout, 2 x EP128 with agreements over gloo", 373.65, slow["rollout"]),
        Check("reshard, true weights", 11.5, slow["reshard"]),
        Check("8 layers recomputed, tokens/s/card", 112.0, _system_rate(true, eight)),
        Check("ref, data through the driver", 156.804, driver["ref"]),
        Check("update, data through the driver", 400.891, driver["update"]),
        Check("ref, data between dies, second run", 105.061, fast["ref"]),
        Check("update, data between dies, second run", 334.152, fast["update"]),
        Check("step, data through the driver, tokens/s/card", 208.5, _system_rate(random, sum(driver.values()))),
        Check("step, data between dies, tokens/s/card", 238.46, _system_rate(random, sum(fast.values()))),
    ]


def _ladder() -> list[Check]:
    """From 419 tokens a second and card on, each stage is the one before less its milliseconds. 162, without graphs, is
    a machine of its own."""
    random = published_step(False)
    tokens = random.sequences * random.longest / CARDS
    step = tokens / 419 / random.longest
    gloo, hccl = (_agreement(replace(random, agreements=kind)) for kind in ("gloo", "hccl"))
    saved = {name: saving / 1000 for name, saving in LADDER_MS.items()} | {"agreements over HCCL": gloo - hccl}
    found = []
    for (name, saving), rate in zip(saved.items(), (456.0, 487.0, 519.0, 618.0), strict=True):
        step -= saving
        found.append(Check(f"rollout ladder: {name}, tokens/s/card", rate, tokens / random.longest / step))
    return found


def _system_rate(step: Step, seconds: float) -> float:
    return step.sequences * (step.prompt_tokens + step.response_tokens) / seconds / (step.dies / 2)


def describe_time(step: Step) -> str:
    """The modelled step as text: where it goes, and what bounds it next."""
    seconds = step_seconds(step)
    total = sum(seconds.values())
    lines = [f"modelled step, {step.dies} {'die' if step.dies == 1 else 'dies'}; no measurement, see docs/rollout.md"]
    for stage, value in seconds.items():
        lines.append(f"  {stage:<8}{value:>10.1f} s  {'#' * round(40 * value / total)}")
    lines.append(f"  {'step':<8}{total:>10.1f} s  {_system_rate(step, total):.1f} tokens a second and card")
    skew = _skew("ref", step) + _skew("update", step)
    parts = {
        name: part * step.longest * _waves(step)
        for name, part in {
            "the host's work in decode steps": _fitted().host,
            "reading weights and cache": _read(step),
            "agreements": _agreement(step),
        }.items()
    }
    lines.append("  rollout: " + ", ".join(f"{name} {value:.1f} s" for name, value in parts.items()))
    lines.append(f"  ref and update: of both {skew:.1f} s until the last die starts")
    parts |= {"until the last die starts": skew, "computing": seconds["ref"] + seconds["update"] - skew}
    bound = max(parts.items(), key=lambda item: item[1])[0]
    utilisation = _fitted().update / (PEAK.teraflops * 1e12)
    lines.append(f"  largest part: {bound}; the update at {utilisation:.0%} of {PEAK.teraflops:g} TFLOPS a die")
    return "\n".join(lines)
