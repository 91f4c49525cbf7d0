"""Finds layouts of a job on fewer nodes than it is configured for, in case nodes are lost.

A layout divides the same work: prompts, responses, mini batches and seeds of a step stay as configured. With the exact
loss the gradients of an update stay the same too, up to the order of sums, with any parallel sizes and micro batches.
Candidates are tried from the configured sizes outwards; the first one that passes the startup checks and fits into
memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import gcd, log2
from typing import Any

from post_training.plan.fsdp_report import FsdpPlan
from post_training.plan.report import JobPlan
from post_training.recovery.reduction import EXACT_LOSS, reduced
from post_training.recovery.signs import Stage
from post_training.report.run_folder import at

Plan = JobPlan | FsdpPlan
Settings = Mapping[str, Any]

_NODE = "actor_rollout_ref"
_ACTOR, _ROLLOUT = f"{_NODE}.actor", f"{_NODE}.rollout"
_MEGATRON = f"{_ACTOR}.megatron"
_TP, _PP = f"{_MEGATRON}.tensor_model_parallel_size", f"{_MEGATRON}.pipeline_model_parallel_size"
_EP, _CP = f"{_MEGATRON}.expert_model_parallel_size", f"{_MEGATRON}.context_parallel_size"
_STAGES = f"{_MEGATRON}.override_transformer_config.num_layer_list"
_RECOMPUTED = f"{_NODE}.model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers"
_ULYSSES = f"{_ACTOR}.ulysses_sequence_parallel_size"
_MICRO = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
_ROLLOUT_TP, _ROLLOUT_EP = f"{_ROLLOUT}.tensor_model_parallel_size", f"{_NODE}.overlay.rollout.expert_parallel_size"
_NODES, _DIES_PER_NODE, _SAVES = "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.save_freq"
_PROMPTS = "data.train_batch_size"
# The micro batch that has to shrink for a phase that does not fit; then the phases whose memory only training's layout
# decides, and those that both layouts decide.
_STAGE_OF: Mapping[str, Stage] = {"update": "update", "update_critic": "update", "ref": "log_prob",
                                  "old_log_prob": "log_prob"}  # fmt: skip
_OF_TRAINING = {*_STAGE_OF, "values"}
_OF_BOTH = {"reshard"}


@dataclass(frozen=True)
class Layout:
    """The layout of a job on `nodes` nodes.

    Attributes:
        text: description for people.
        overrides: Hydra overrides that give the job this layout.
    """

    nodes: int
    text: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layouts:
    """Layouts with which a job can go on, down to `least` nodes.

    Attributes:
        configured: number of nodes in the job's configuration.
        fitting: largest number of nodes first.
        short: by other number of nodes, why the job does not run on it.
    """

    configured: int
    least: int = 1
    fitting: tuple[Layout, ...] = ()
    short: Mapping[int, str] = field(default_factory=dict)


def find_layouts(
    config: Mapping[str, Any],
    layers: int,
    least: int,
    plan_of: Callable[[Sequence[str]], tuple[Mapping[str, Any], Plan]],
) -> Layouts:
    """Find layouts for every number of nodes from one below the configured one down to `least`.

    The search ends at the first number of nodes whose memory is too small, because fewer nodes have less.

    Args:
        config: the job's resolved configuration.
        layers: number of the model's layers.
        least: smallest number of nodes, 1 or more.
        plan_of: returns configuration and plan with additional overrides; raises ValueError if a check rejects them.

    Raises:
        ValueError: the job cannot go on in another layout; the message is one sentence.
    """
    _check(config, least)
    configured, per_node, prompts = (at(config, key) for key in (_NODES, _DIES_PER_NODE, _PROMPTS))
    fitting, short = list[Layout](), dict[int, str]()
    for nodes in range(configured - 1, least - 1, -1):
        if prompts % (nodes * per_node):
            short[nodes] = f"{_PROMPTS}={prompts} does not divide among the dies"
            continue
        search = _Search(config, layers, nodes, plan_of)
        layout = search.first()
        if layout is not None:
            fitting.append(layout)
            continue
        short[nodes] = search.reason()
        if search.closest is not None:
            break
    return Layouts(configured, least, tuple(fitting), short)


def _check(config: Mapping[str, Any], least: int) -> None:
    nodes, saves = at(config, _NODES), at(config, _SAVES)
    if nodes < 2:
        raise ValueError(f"{_NODES}={nodes} is invalid for a job that continues with fewer nodes. Set it to 2 or more")
    if least >= nodes:
        raise ValueError(
            f"--min-nodes={least} is invalid: the job has {nodes} nodes. Set it to a number from 1 to {nodes - 1}"
        )
    if not isinstance(saves, int) or saves < 1:
        raise ValueError(
            f"{_SAVES}={saves} is invalid for a job that continues with fewer nodes: without checkpoints it would "
            "start over. Set it to the number of steps that a lost node may cost"
        )
    if not at(config, EXACT_LOSS):
        raise ValueError(
            f"{EXACT_LOSS}=False is invalid for a job that continues with fewer nodes: its gradients depend on the "
            "layout. Set it to true"
        )


class _Search:
    """Search among the candidates for one number of nodes."""

    def __init__(self, config: Mapping[str, Any], layers: int, nodes: int, plan_of: Callable[..., Any]) -> None:
        dies = nodes * at(config, _DIES_PER_NODE)
        self._config, self._nodes, self._plan_of = config, nodes, plan_of
        on_megatron = at(config, f"{_ACTOR}.strategy") == "megatron"
        self._trainings = list(_megatron(config, layers, dies) if on_megatron else _fsdp(config, dies))
        self._rollouts = list(_rollouts(config, dies))
        self._rejected = ""
        self.closest: Plan | None = None

    def first(self) -> Layout | None:
        """Return the first candidate that fits, or None; candidates near the configured sizes come first."""
        bad_trainings, bad_rollouts = set[int](), set[int]()
        for rollout, training in product(range(len(self._rollouts)), range(len(self._trainings))):
            if training in bad_trainings or rollout in bad_rollouts:
                continue
            sizes = {**self._trainings[training], **self._rollouts[rollout]}
            candidate = {_NODES: self._nodes} | {k: v for k, v in sizes.items() if v != at(self._config, k)}
            try:
                settings, plan = self._with_micro_batches(candidate)
            except ValueError as error:
                self._rejected = self._rejected or str(error)
                continue
            if not plan.problems():
                return Layout(self._nodes, _describe(plan), tuple(_overrides(settings)))
            if self.closest is None or _excess(plan) < _excess(self.closest):
                self.closest = plan
            beyond, cache_short = _beyond(plan), _cache(plan) > 1
            # A reshard that does not fit may be due to either layout, a host that is too small to the training's.
            if beyond & _OF_TRAINING or not (beyond or cache_short):
                bad_trainings.add(training)
            if beyond - _OF_TRAINING - _OF_BOTH or cache_short:
                bad_rollouts.add(rollout)
        return None

    def reason(self) -> str:
        """Return which memory is too small for the best candidate; if no candidate passed the checks, their error."""
        if self.closest is not None:
            return f"{_describe(self.closest)}: {'; '.join(self.closest.problems())}"
        return self._rejected or "no parallel sizes near the configured ones divide its dies"

    def _with_micro_batches(self, candidate: Settings) -> tuple[Settings, Plan]:
        """Return the candidate, with smaller micro batches if these alone make it fit, and its plan."""
        settings = dict(candidate)
        while True:
            config, plan = self._plan_of(_overrides(settings))
            beyond, smaller = _beyond(plan), dict[str, Any]()
            if beyond and beyond <= _STAGE_OF.keys() and len(plan.problems()) == len(beyond):
                for stage in {_STAGE_OF[phase] for phase in beyond}:
                    smaller |= reduced(config, stage)
            if not smaller:
                return settings, plan
            settings |= smaller


def _beyond(plan: Plan) -> set[str]:
    """Return the phases that need more memory than a die has."""
    return {phase for phase, size in plan.peaks().items() if size > plan.machine.die}


def _cache(plan: Plan) -> float:
    """Return the longest sequence as a multiple of the tokens that fit into the KV cache."""
    return plan.job.sequence_tokens / max(plan.device.kv_tokens, 1)


def _excess(plan: Plan) -> float:
    """Return the largest ratio of needed to available bytes, over die, KV cache and host."""
    on_host = plan.host.total / plan.machine.host if isinstance(plan, JobPlan) and plan.machine.host else 0.0
    return max(max(plan.peaks().values()) / plan.machine.die, _cache(plan), on_host)


def _overrides(settings: Settings) -> list[str]:
    return [f"{key}={str(value).replace(' ', '')}" for key, value in settings.items()]


def _distance(value: int, configured: int) -> float:
    """Return the distance of two sizes in doublings."""
    return abs(log2(value / configured))


def _scaled(size: int, *factors: float) -> list[int]:
    """Return the size times each factor, if that is a whole number of at least 1."""
    return [int(size * factor) for factor in factors if size * factor >= 1 and size * factor == int(size * factor)]


def _megatron(config: Mapping[str, Any], layers: int, dies: int) -> Iterator[Settings]:
    """Yield tensor and pipeline parallel sizes, nearest to the configured ones first.

    Experts are spread over some of the replicas, or over all.
    """
    tp, pp, experts = at(config, _TP), at(config, _PP), at(config, _EP)
    context, given = at(config, _CP) or 1, at(config, _STAGES)
    sizes = product(_scaled(tp, 1, 0.5, 2, 0.25), _scaled(pp, 1, 0.5, 2, 0.25))
    for tensor, stages in sorted(sizes, key=lambda size: _distance(size[0], tp) + _distance(size[1], pp)):
        if dies % (tensor * stages * context) or stages > layers or (not given and layers % stages):
            continue
        replicas = dies // (tensor * stages * context)
        spreads = [gcd(experts, replicas), *([replicas] if experts > 1 else [])]
        for spread in dict.fromkeys(spreads):
            yield {
                _TP: tensor,
                _PP: stages,
                _EP: spread,
                **_stages(config, given, layers, stages),
                **_micro_batch(config, replicas),
            }


def _stages(config: Mapping[str, Any], given: Sequence[int] | None, layers: int, stages: int) -> Settings:
    """Return the layers of each stage, divided as evenly as possible, with the same share recomputed as before."""
    if not given or len(given) == stages:
        return {}
    divided = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    recomputed = at(config, _RECOMPUTED)
    part = {_RECOMPUTED: -(-recomputed * max(divided) // max(given))} if isinstance(recomputed, int) else {}
    return {_STAGES: divided, **part}


def _fsdp(config: Mapping[str, Any], dies: int) -> Iterator[Settings]:
    shared = at(config, _ULYSSES) or 1
    parts = gcd(shared, dies)
    yield {**({_ULYSSES: parts} if parts != shared else {}), **_micro_batch(config, dies // parts)}


def _micro_batch(config: Mapping[str, Any], replicas: int) -> Settings:
    """Return the update's largest micro batch, up to the configured one, that divides a replica's mini batch share."""
    micro = at(config, _MICRO)
    sequences = at(config, f"{_ACTOR}.ppo_mini_batch_size") * at(config, f"{_ROLLOUT}.n")
    if at(config, f"{_ACTOR}.use_dynamic_bsz") or not isinstance(micro, int) or sequences % replicas:
        return {}
    fitting = gcd(micro, sequences // replicas)
    return {_MICRO: fitting} if fitting != micro else {}


def _rollouts(config: Mapping[str, Any], dies: int) -> Iterator[Settings]:
    """Yield engine sizes: the configured one as far as it divides the dies, then a larger and a smaller one.

    A larger engine needs less memory on a die; of smaller engines there are more.
    """
    configured, experts = at(config, _ROLLOUT_TP), at(config, _ROLLOUT_EP) or 1
    smallest = gcd(configured, dies)
    tensors = [size for size in (smallest, 2 * smallest, smallest // 2) if size and dies % size == 0]
    spreads = dict.fromkeys([gcd(experts, dies), dies]) if experts > 1 else {1: None}
    for spread, tensor in product(spreads, tensors):
        if experts > 1 and spread % tensor:
            continue
        yield {_ROLLOUT_TP: tensor, **({_ROLLOUT_EP: spread} if experts > 1 else {})}


def _describe(plan: Plan) -> str:
    if isinstance(plan, FsdpPlan):
        tp = plan.job.rollout_tp
        return f"FSDP over {plan.job.dies} dies, rollout {plan.job.dies // tp} x TP{tp}"
    train, rollout = plan.job.train, plan.job.rollout
    return (
        f"TP{train.tp} PP{train.pp} EP{train.ep} DP{train.dp}, rollout {rollout.instances} x "
        f"(TP{rollout.tp} DP{rollout.dp} EP{rollout.ep})"
    )


def describe_layouts(layouts: Layouts) -> str:
    """Format a line for each number of nodes; numbers without a layout for the same reason share a line."""
    lines = [f"nodes of {layouts.configured}, and how the job continues with them"]
    for layout in layouts.fitting:
        changed = [each for each in layout.overrides if not each.startswith(f"{_NODES}=")]
        lines += [f"  {layout.nodes:<6}{layout.text}", *(f"        {each}" for each in changed)]
    for reason in dict.fromkeys(layouts.short.values()):
        numbers = ", ".join(str(nodes) for nodes, of_it in layouts.short.items() if of_it == reason)
        lines.append(f"  {numbers:<6}DOES NOT FIT: {reason}")
    searched = layouts.configured - layouts.least - len(layouts.fitting) - len(layouts.short)
    return "\n".join(
        [*lines, *(["  fewer nodes need more memory on every die"] if searched > 0 and layouts.short else [])]
    )
