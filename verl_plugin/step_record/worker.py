"""A rank that replays a recorded step.

    torchrun -m verl_plugin.step_record.worker FOLDER RESULT [...]

It is verl's own worker without a rollout, with the engines and modules of the
recorded configuration. The samples are divided among the data-parallel ranks in
the order of the recorded batch, as verl divides them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested, response_to_nested

from post_training.plan.verl_0_9_jobs import ulysses_parts
from verl_plugin.step_record.comparison import STAGES, Compared, compare_metrics, compare_rows
from verl_plugin.step_record.first_operator import FirstOperator
from verl_plugin.step_record.folder import RecordedStep, RecordError, read_record

_MASK, _ONE_TURN = "response_mask", "single_turn_agent"
# Metrics of an update that depend neither on its duration nor on the samples' distribution over ranks.
_COMPARED = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/loss", "actor/ppo_kl", "actor/pg_clipfrac")


class Replay:
    """The replay of a step on this rank.

    Args:
        record: the recorded step.
        weights: folder of the weights before it; None for the model's own.
        overrides: `KEY=VALUE` for keys of the recorded configuration, such as another layout.
        tolerance: absolute, and relative for metrics above 1.
        layers: find the operator of the first value that is not finite.
    """

    def __init__(
        self,
        record: RecordedStep,
        weights: Path | None,
        overrides: Sequence[str],
        tolerance: float,
        layers: bool = False,
    ) -> None:
        self.record, self.weights, self.tolerance, self.layers = record, weights, tolerance, layers
        config: Any = OmegaConf.merge(OmegaConf.create(dict(record.config)), OmegaConf.from_dotlist(list(overrides)))
        # This process sends no weights to a rollout.
        config.actor_rollout_ref.rollout.checkpoint_engine.backend = "naive"
        self.config = config
        self.origins: dict[str, str] = {}

    def run(self, until: str) -> list[Compared]:
        """Compare the stages up to `until`, one of `STAGES`; every rank returns the same.

        Raises:
            RecordError: ranks would divide the samples into other mini batches than those that were trained.
        """
        if until == STAGES[-1]:
            self._require_mini_batches()
        found: list[Compared] = []
        for stage in STAGES[: STAGES.index(until) + 1]:
            found += getattr(self, f"_{stage}")()
        return found

    def _require_mini_batches(self) -> None:
        """Require the recorded ranks if a step has several updates: a mini batch is a part of each rank's samples."""
        samples, mini = len(self.record.keys), self.record.given.get("mini_batch_size", 0)
        recorded = _replicas(self.record.config, self.record.dies)
        # Its workers, which are made later, begin the process group of as many ranks.
        ranks = _replicas(OmegaConf.to_container(self.config), int(os.environ["WORLD_SIZE"]))
        if 0 < mini < samples and ranks != recorded:
            raise RecordError(
                f"the step has {samples // mini} updates, among which {ranks} data-parallel ranks divide its samples "
                f"otherwise than the recorded {recorded}. Set --dies to keep {recorded}, or --until {STAGES[-2]}"
            )

    def _mask(self) -> list[Compared]:
        """Expect every token of an answer to be trained, where answers have one turn and none is rejected."""
        keys, columns, rollout = self.record.keys, self.record.columns, self.config.actor_rollout_ref.rollout
        if OmegaConf.select(rollout, "multi_turn.enable") or rollout.agent.default_agent_loop != _ONE_TURN:
            return []  # turns of a tool or a user are not trained
        if OmegaConf.select(self.config, "algorithm.rollout_correction.rollout_rs"):
            return []  # rejected tokens are not trained
        lengths = zip(keys, map(len, columns["responses"].rows), strict=True)
        trained = [torch.full((length,), float(key not in self.record.padding)) for key, length in lengths]
        return [compare_rows("mask", "trained tokens of answers", keys, columns[_MASK].rows, trained, 0)]

    def _ref(self) -> list[Compared]:
        if "ref_log_prob" not in self.record.columns:
            return []
        worker = self._worker("ref")
        rows = self._log_probs(worker.compute_ref_log_prob, worker.ref.engine, "ref")
        return [self._compared("ref", "log-probs of the reference", "ref_log_prob", rows)]

    def _old_log_prob(self) -> list[Compared]:
        rows = self._log_probs(self.actor.compute_log_prob, self.actor.actor.engine, "old_log_prob")
        names = {"rollout_log_probs": "log-probs of the rollout", "old_log_probs": "log-probs before the update"}
        known = [name for name in names if name in self.record.columns]
        return [self._compared("old_log_prob", names[name], name, rows) for name in known]

    def _advantages(self) -> list[Compared]:
        columns, algorithm = self.record.columns, self.config.algorithm
        correction = algorithm.get("rollout_correction") or {}
        if algorithm.use_kl_in_reward or correction.get("rollout_is") or correction.get("rollout_rs"):
            return []  # rewards are then more than the recorded scores
        fields = {name: columns[name].tensor() for name in (_MASK, "rm_scores", "values") if name in columns}
        mask = fields[_MASK]
        padded = TensorDict(fields, batch_size=len(self.record.keys)).to_padded_tensor()
        padded["token_level_rewards"] = padded["token_level_scores"] = padded["rm_scores"]
        data = DataProto(batch=padded)
        data.non_tensor_batch["uid"] = _prompts(self.record.keys)
        data = compute_advantage_for_multi_trajectories(
            data,
            batch_keys=self.record.keys,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
        rows = list(response_to_nested(data.batch["advantages"], mask).unbind())
        return [self._compared("advantages", "advantages of tokens", "advantages", rows)]

    def _update(self) -> list[Compared]:
        engine = self.actor.actor.engine
        data = self._samples(engine, self.record.given)
        with ExitStack() as stack:
            self._watch(stack, engine, "update")
            output = self.actor.update_actor(data)
        own = {} if output is None else rename_dict(tu.get(output, "metrics"), "actor/")
        metrics = reduce_metrics(next(each for each in _everyone(own) if each))
        names = [name for name in _COMPARED if name in metrics and name in self.record.metrics]
        return compare_metrics("update", self.record.metrics, metrics, self.tolerance, names)

    def _worker(self, role: str) -> Any:
        worker = ActorRolloutRefWorker(self.config.actor_rollout_ref, role=role)
        worker.init_model()
        return worker

    @cached_property
    def actor(self) -> Any:
        """The worker that trains, with the weights before the step."""
        worker = self._worker("actor")
        if self.weights is not None:
            worker.load_checkpoint(str(self.weights))
        return worker

    def _log_probs(self, compute: Any, engine: Any, stage: str) -> list[torch.Tensor]:
        """Return the log-probs of all samples' answers, [tokens] each, on every rank."""
        own: dict[str, Any] = {"calculate_entropy": False, "compute_loss": False}
        data = self._samples(engine, {**own, "temperature": self.config.actor_rollout_ref.rollout.temperature})
        mask = data[_MASK]
        with ExitStack() as stack:
            self._watch(stack, engine, stage)
            output = compute(data)
        rows = []
        if output is not None:
            rows = [row.cpu() for row in response_from_nested(output["log_probs"], mask.cpu()).unbind()]
        parts = _everyone((engine.get_data_parallel_rank(), rows))
        by_rank = {place: found for place, found in parts if found}
        return [row for place in sorted(by_rank) for row in by_rank[place]]

    def _samples(self, engine: Any, given: Any) -> Any:
        """Return this data-parallel rank's share of the samples, as verl's workers get them."""
        ranks, rank, count = engine.get_data_parallel_size(), engine.get_data_parallel_rank(), len(self.record.keys)
        if count % ranks:
            raise RecordError(f"{count} samples cannot be divided among {ranks} data-parallel ranks. Set other --dies")
        share = slice(count // ranks * rank, count // ranks * (rank + 1))
        computed = ("log_probs", "entropy")  # which the workers return
        tensors = {name: column.tensor(share) for name, column in self.record.columns.items() if name not in computed}
        return tu.get_tensordict(tensors, dict(given))

    def _compared(self, stage: str, what: str, column: str, rows: list[torch.Tensor]) -> Compared:
        recorded = self.record.columns[column].rows
        return compare_rows(stage, what, self.record.keys, recorded, rows, self.tolerance)

    def _watch(self, stack: ExitStack, engine: Any, stage: str) -> None:
        """With `layers`, look at every operator of the pass, and keep the first bad one of this rank in `origins`."""
        if not self.layers:
            return
        modules = engine.module if isinstance(engine.module, list) else [engine.module]
        mode = FirstOperator()
        stack.callback(self._remember, stage, mode)
        stack.enter_context(mode.following(modules))
        stack.enter_context(mode)

    def _remember(self, stage: str, mode: FirstOperator) -> None:
        if mode.origin is not None:
            self.origins[stage] = f"rank {dist.get_rank()}: {mode.origin.sentence()}"


def _replicas(config: Any, dies: int) -> int:
    """Return the number of data-parallel ranks of training."""
    actor = config["actor_rollout_ref"]["actor"]
    if actor["strategy"] == "megatron":
        sizes = (f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
        return dies // math.prod(actor["megatron"][name] for name in sizes)
    return dies // ulysses_parts(actor)


def _prompts(keys: Sequence[str]) -> Any:
    import numpy as np

    return np.array([key.rsplit("_", 2)[0] for key in keys], dtype=object)


def _everyone(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank; an error is also written to a file of its own beside the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1])
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--tolerance", type=float, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args(arguments)
    try:
        replay(options)
    except Exception as error:
        name = f"{options.result.stem}.{os.environ['RANK']}.error"
        options.result.with_name(name).write_text(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}")
        raise


def replay(options: argparse.Namespace) -> None:
    """Replay the step; the first rank writes the comparison."""
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    step = Replay(*read_record(options.folder), options.overrides, options.tolerance, options.layers)
    found = step.run(options.until)
    origins = _everyone(step.origins)
    if dist.get_rank() == 0:
        by_stage = {stage: [each[stage] for each in origins if stage in each] for stage in STAGES}
        content = {"compared": [vars(each) for each in found], "origins": {k: v for k, v in by_stage.items() if v}}
        options.result.write_text(json.dumps(content, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
