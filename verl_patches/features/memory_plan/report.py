"""A plan in words: batches, memory by phase, hosts, disks, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from verl_patches.features.memory_plan.device import DeviceMemory, device_memory
from verl_patches.features.memory_plan.job import Job
from verl_patches.features.reshard.figures import PlanFigures, plan_figures


@dataclass(frozen=True)
class Machine:
    """Bytes of a die, of a node's host and of the file system for checkpoints; 0 where it is not known."""

    die: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class JobPlan:
    """Everything that a job needs. `host` is bytes of a node, `checkpoint` and `weights_on_disk` of the whole job."""

    job: Job
    machine: Machine
    device: DeviceMemory
    reshard: PlanFigures
    host: int
    weights_on_disk: int
    checkpoint: int

    def problems(self) -> list[str]:
        """What does not fit, one sentence each; empty if everything does."""
        found = [
            f"{phase}: {size / 1e9:.2f} GB a die, and a die has {self.machine.die / 1e9:.2f}; {REMEDIES[phase]}"
            for phase, size in self.device.phases.items()
            if size > self.machine.die
        ]
        longest = self.job.engine_sequences * self.job.sequence_tokens
        if self.device.kv_tokens < self.job.sequence_tokens:
            found.append(
                f"KV cache: room for {self.device.kv_tokens} tokens, and one sequence may have "
                f"{self.job.sequence_tokens}; raise gpu_memory_utilization or spread the experts over more dies"
            )
        elif self.device.kv_tokens < longest:
            found.append(
                f"KV cache: room for {self.device.kv_tokens} of the {longest} tokens of {self.job.engine_sequences} "
                "full sequences, so the engine will preempt some; lower max_num_seqs or spread experts over more dies"
            )
        if self.machine.host and self.host > self.machine.host:
            found.append(f"host: {self.host / 1e9:.0f} GB a node, and a node has {self.machine.host / 1e9:.0f}")
        if self.machine.disk and self.checkpoint > self.machine.disk:
            found.append(
                f"disk: {self.checkpoint / 1e9:.0f} GB a checkpoint, and {self.machine.disk / 1e9:.0f} are free"
            )
        return found


REMEDIES = {
    "idle": "spread the experts of the rollout over more dies",
    "reshard": "lower actor_rollout_ref.overlay.reshard.bucket_bytes, or spread the experts over more dies",
    "rollout": "lower actor_rollout_ref.rollout.gpu_memory_utilization",
    "ref": "lower actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu, or use more pipeline stages",
    "update": "let the optimizer's state stay on the host (--swap-optimizer), or use more pipeline stages or dies",
}


def make_job_plan(job: Job, machine: Machine) -> JobPlan:
    """Work out a job. Raises ValueError when the placements do not fit each other."""
    figures, _ = plan_figures(
        job.table, job.train, job.rollout, job.bucket_bytes, job.itemsize, job.dies_per_node, relay=False
    )
    device = device_memory(job, machine.die, figures.staging_peak)
    elements = sum(prod(shape) for shape in job.table.shapes.values())
    return JobPlan(
        job,
        machine,
        device,
        figures,
        host=device.host * job.dies_per_node,
        weights_on_disk=elements * job.itemsize,
        checkpoint=elements * (job.itemsize + 12),
    )


def describe(plan: JobPlan) -> str:
    """The plan as a table of lines."""
    job, device = plan.job, plan.device
    engines = job.dies // job.rollout.tp
    replica = job.sequences // job.train.dp
    lines = [
        f"dies              {job.dies} on {job.nodes} nodes",
        f"training          TP{job.train.tp} PP{job.train.pp} EP{job.train.ep} DP{job.train.dp}, "
        f"layers {','.join(map(str, job.train.num_layer_list))}",
        f"rollout           {job.rollout.instances} x (TP{job.rollout.tp} DP{job.rollout.dp} EP{job.rollout.ep})",
        f"step              {job.prompts} prompts x {job.responses} = {job.sequences} sequences of up to "
        f"{job.sequence_tokens} tokens",
        f"  an engine       {job.sequences // engines} sequences, {job.engine_sequences} at a time",
        f"  a replica       {replica} sequences, {replica // job.micro_update} micro batches of {job.micro_update}",
        "",
        "GB a die",
        f"  weights         {device.weights_training / 1e9:.2f} in training, "
        f"{device.weights_rollout / 1e9:.2f} in rollout",
        f"  gradients       {device.gradients / 1e9:.2f}",
        f"  optimizer       {device.optimizer / 1e9:.2f}{' on the host' if job.swaps_optimizer else ''}",
        f"  KV cache        {device.kv_cache / 1e9:.2f}: {device.kv_tokens} tokens, "
        f"{device.kv_tokens // job.sequence_tokens} full sequences",
        f"  reshard         {plan.reshard.received.average / 1e9:.2f} received in {plan.reshard.rounds} collectives, "
        f"{device.staging / 1e9:.2f} staged",
        "",
        f"GB a die at the peak of a phase, of {plan.machine.die / 1e9:.2f}",
        *(f"  {phase:<16}{size / 1e9:.3f}" for phase, size in device.phases.items()),
        "",
        f"host              {plan.host / 1e9:.0f} GB a node for what is away from the dies",
        f"disk              {plan.weights_on_disk / 1e9:.0f} GB of weights, "
        f"{plan.checkpoint / 1e9:.0f} GB a checkpoint",
        "",
        *([f"DOES NOT FIT: {problem}" for problem in plan.problems()] or ["everything fits"]),
    ]
    return "\n".join(lines)
