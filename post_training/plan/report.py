"""A plan in words: batches, memory by phase, hosts, disks, and everything that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod

from post_training.plan.device import DeviceMemory, device_memory
from post_training.plan.job import Job
from post_training.plan.outside_torch import NOTHING_OUTSIDE, OutsideTorch, communicators
from post_training.reshard.statistics import PlanStatistics, plan_statistics

# Ray keeps objects in shared memory: by default three tenths of a node's memory, and no more than this.
OBJECT_STORE_SHARE, OBJECT_STORE_MOST = 0.3, 200 * 10**9
# Memory of a worker after all imports and without data: 0.92 GB were measured, without CANN's part.
PROCESS = 10**9
# Processes on a node beside one worker per die: the trainer's on the head node, and Ray's own.
OTHER_PROCESSES = 4


@dataclass(frozen=True)
class Machine:
    """The hardware of a job, in bytes; 0 if unknown.

    Attributes:
        die: memory of a die.
        host: memory of a node's host.
        disk: free space for checkpoints.
        outside: device memory that is used beside tensors.
        storage: bytes per second with which all nodes together write checkpoints.
    """

    die: int
    host: int = 0
    disk: int = 0
    outside: OutsideTorch = NOTHING_OUTSIDE
    storage: float = 0.0


@dataclass(frozen=True)
class HostMemory:
    """Host memory of a node in bytes.

    Attributes:
        away: tensors that the offload manager and the optimizer keep on the host.
        objects: Ray's object store.
        processes: memory of all processes beside these.
    """

    away: int
    objects: int
    processes: int

    @property
    def total(self) -> int:
        return self.away + self.objects + self.processes


@dataclass(frozen=True)
class JobPlan:
    """Everything that a job needs.

    Attributes:
        weights_on_disk: bytes of the whole model.
        checkpoint: bytes of one checkpoint of the whole job; 0 if none is written.
        remedies: by phase, and for the disk.
    """

    job: Job
    machine: Machine
    device: DeviceMemory
    reshard: PlanStatistics
    host: HostMemory
    weights_on_disk: int
    checkpoint: int
    remedies: Mapping[str, str] = field(default_factory=lambda: REMEDIES)

    @property
    def checkpoints(self) -> int:
        """Bytes of the checkpoints on the disk at one time: those that are kept, and the one being written.

        If all are kept, the bytes of one.
        """
        return self.checkpoint * (self.job.keeps + 1)

    def peaks(self) -> dict[str, int]:
        """Return the bytes of a die at the peak of each phase: tensors, and memory of HCCL and CANN."""
        return {phase: size + self.device.outside for phase, size in self.device.phases.items()}

    def device_bytes(self) -> dict[str, int | dict[str, int]]:
        """Return everything about a die in bytes, for programs.

        `phases` are as `describe` prints them, `tensors` as torch counts them; all other keys are parts of them.
        """
        parts = asdict(self.device)
        groups = communicators(self.job)
        outside = {
            "communicators": sum(not each.only_sends for each in groups),
            "hccl_buffer": self.machine.outside.hccl_buffer,
            "p2p_communicators": sum(each.only_sends for each in groups),
            "p2p_buffer": self.machine.outside.p2p_buffer,
            "cann": self.machine.outside.cann,
        }
        return {"die": self.machine.die, **parts, **outside, "tensors": parts["phases"], "phases": self.peaks()}

    def problems(self) -> list[str]:
        """Return a sentence for each thing that does not fit; empty if everything fits."""
        found = beyond_the_die(self.peaks(), self.machine.die, self.remedies)
        if self.device.kv_tokens < self.job.sequence_tokens:
            found.append(
                f"KV cache: room for {self.device.kv_tokens} tokens, but one sequence may have "
                f"{self.job.sequence_tokens}; raise gpu_memory_utilization or spread the experts over more dies"
            )
        if self.machine.host and self.host.total > self.machine.host:
            found.append(f"host: {self.host.total / 1e9:.0f} GB a node, but a node has {self.machine.host / 1e9:.0f}")
        if self.machine.disk and self.checkpoints > self.machine.disk:
            found.append(
                f"disk: {self.checkpoints / 1e9:.0f} GB of checkpoints, but {self.machine.disk / 1e9:.0f} are free; "
                f"{self.remedies['disk']}"
            )
        return found

    def remarks(self) -> list[str]:
        """Return a sentence for each thing that fits but may still cause trouble."""
        longest = self.job.engine_sequences * self.job.sequence_tokens
        if self.job.sequence_tokens <= self.device.kv_tokens < longest:
            return [
                f"KV cache: room for {self.device.kv_tokens} of the {longest} tokens of {self.job.engine_sequences} "
                "full sequences, so the engine preempts some if all get that long; lower max_num_seqs or HCCL_BUFFSIZE"
            ]
        return []


REMEDIES: Mapping[str, str] = {
    "idle": "spread the experts of the rollout over more dies",
    "reshard": "lower actor_rollout_ref.overlay.reshard.bucket_bytes, or spread the experts over more dies",
    "rollout": "lower actor_rollout_ref.rollout.gpu_memory_utilization",
    "ref": "lower actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu, or use more pipeline stages",
    "values": "lower critic.ppo_micro_batch_size_per_gpu, or use more pipeline stages",
    "update_critic": "lower critic.ppo_micro_batch_size_per_gpu, or use more pipeline stages or dies",
    "disk": "lower actor_rollout_ref.overlay.checkpoint.keep_last, or set trainer.save_freq=-1",
    "update": "keep the optimizer's state on the host (--swap-optimizer), or use more pipeline stages or dies",
}


def beyond_the_die(peaks: Mapping[str, int], die: int, remedies: Mapping[str, str]) -> list[str]:
    """Return a sentence for each phase whose peak exceeds the memory of a die; `peaks` and `die` are bytes."""
    return [
        f"{phase}: {size / 1e9:.2f} GB a die, but a die has {die / 1e9:.2f}; {remedies[phase]}"
        for phase, size in peaks.items()
        if size > die
    ]


def make_job_plan(job: Job, machine: Machine, remedies: Mapping[str, str] = REMEDIES) -> JobPlan:
    """Plan a job. Raises ValueError if the placements do not fit each other."""
    reshard, _ = plan_statistics(
        job.table, job.train, job.rollout, job.bucket_bytes, job.itemsize, job.dies_per_node, job.relays_weights
    )
    device = device_memory(job, machine.die, reshard.staging_peak, machine.outside)
    elements = sum(prod(shape) for shape in job.table.shapes.values())
    critics = sum(prod(shape) for shape in job.critic.table.shapes.values()) if job.critic else 0
    return JobPlan(
        job,
        machine,
        device,
        reshard,
        host=host_memory(job, device, machine),
        weights_on_disk=elements * job.itemsize,
        # Weights, and in float32 the main parameters and both moments.
        checkpoint=(elements + critics) * 12 if job.saves_every else 0,
        remedies=remedies,
    )


def host_memory(job: Job, device: DeviceMemory, machine: Machine) -> HostMemory:
    """Return the host memory of a node. Ray reserves its store when it starts, and fills it with batches."""
    store = min(OBJECT_STORE_SHARE * machine.host, OBJECT_STORE_MOST) if machine.host else OBJECT_STORE_MOST
    processes = (job.dies_per_node + OTHER_PROCESSES) * PROCESS
    return HostMemory(device.host * job.dies_per_node, int(store), processes)


def _micro_batches(job: Job, sequences: int) -> str:
    if job.update_tokens is not None:
        return f"micro batches of at most {job.update_tokens} tokens"
    return f"{sequences // job.micro_update} micro batches of {job.micro_update}"


def describe(plan: JobPlan) -> str:
    """Format the plan as a table."""
    job, device = plan.job, plan.device
    critic = device.critic_weights + device.critic_optimizer
    engines = job.dies // job.rollout.tp
    replicas = job.train.dp // job.context
    replica, shared = job.sequences // replicas, f" CP{job.context}" if job.context > 1 else ""
    lines = [
        f"dies              {job.dies} on {job.nodes} nodes",
        f"training          TP{job.train.tp}{shared} PP{job.train.pp} EP{job.train.ep} DP{replicas}, "
        f"layers {','.join(map(str, job.train.num_layer_list))}",
        f"rollout           {job.rollout.instances} x (TP{job.rollout.tp} DP{job.rollout.dp} EP{job.rollout.ep})",
        f"step              {job.prompts} prompts x {job.responses} = {job.sequences} sequences of up to "
        f"{job.sequence_tokens} tokens",
        f"  an engine       {job.sequences // engines} sequences, {job.engine_sequences} at a time",
        f"  a replica       {replica} sequences, {_micro_batches(job, replica)}",
        "",
        "GB a die",
        f"  weights         {device.weights_training / 1e9:.2f} in training, "
        f"{device.weights_rollout / 1e9:.2f} in rollout",
        f"  gradients       {device.gradients / 1e9:.2f}",
        f"  recomputed      {_recomputed(job)}",
        f"  optimizer       {device.optimizer / 1e9:.2f}{' on the host' if job.swaps_optimizer else ''}",
        *([f"  critic          {critic / 1e9:.2f} of weights and optimizer"] if job.critic else []),
        f"  KV cache        {device.kv_cache / 1e9:.2f}: {device.kv_tokens} tokens, "
        f"{device.kv_tokens // job.sequence_tokens} full sequences",
        f"  reshard         {plan.reshard.received.average / 1e9:.2f} received in {plan.reshard.buckets} collectives, "
        f"{device.staging / 1e9:.2f} staged",
        "",
        *_phases(plan),
        "",
        f"host              {plan.host.total / 1e9:.0f} GB a node: {plan.host.away / 1e9:.0f} away from the dies, "
        f"up to {plan.host.objects / 1e9:.0f} of Ray's objects, {plan.host.processes / 1e9:.0f} of processes",
        f"disk              {plan.weights_on_disk / 1e9:.0f} GB of weights; "
        + ("no checkpoint is written" if not job.saves_every else f"a checkpoint every {job.saves_every} steps"),
        *_checkpoints(plan),
        "",
        *([f"DOES NOT FIT: {problem}" for problem in plan.problems()] or ["everything fits"]),
        *(f"but: {remark}" for remark in plan.remarks()),
    ]
    return "\n".join(lines)


def _checkpoints(plan: JobPlan) -> list[str]:
    """Format the size of a checkpoint, and the time to write it at the machine's speed."""
    job, size = plan.job, plan.checkpoint
    if not size:
        return []
    number = job.keeps + 1
    room = f"{plan.checkpoints / 1e9:.0f} GB for {number} at a time" if job.keeps else "all of them stay"
    lines = [f"  a checkpoint    {size / 1e9:.0f} GB, {size / job.dies / 1e9:.3g} a die; {room}"]
    if plan.machine.storage:
        seconds = size / plan.machine.storage
        lines.append(f"  writing one     {seconds:.0f} s at {plan.machine.storage / 1e9:g} GB/s")
    return lines


def _recomputed(job: Job) -> str:
    how = job.recomputation
    if how is None:
        return "nothing"
    if how.granularity == "selective":
        return "core attention, which frees nothing here"
    return f"{how.layers} layers of a stage" if how.method == "block" else f"all layers, in groups of {how.layers}"


def _phases(plan: JobPlan) -> list[str]:
    """Format the peak of each phase, with the part that torch does not count."""
    outside, taken = plan.device.outside, plan.machine.outside
    lines = [f"GB a die at the peak of a phase, of {plan.machine.die / 1e9:.2f}"]
    lines += [f"  {phase:<16}{size / 1e9:.3f}" for phase, size in plan.peaks().items()]
    if outside:
        sends = [each.only_sends for each in communicators(plan.job)]
        between_two = f"{sum(sends)} of 2 x {taken.p2p_buffer / 2**20:.0f} MiB, " if any(sends) else ""
        lines.append(
            f"  in each of them {outside / 1e9:.3f} beside tensors: {len(sends) - sum(sends)} communicators of 2 x "
            f"{taken.hccl_buffer / 2**20:.0f} MiB, {between_two}and {taken.cann / 2**20:.0f} MiB of CANN"
        )
    return lines
