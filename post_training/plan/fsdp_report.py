"""The plan of a job on FSDP in words: memory by phase, the free part of a die, and everything that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from post_training.plan.fsdp import OPTIMIZER_OFFLOAD, REMEDIES, FsdpJob, FsdpMemory, fsdp_memory
from post_training.plan.report import Machine, beyond_the_die

SPARE = 0.2
"""The share of a die that should stay free for fragmentation, the driver, and answers longer than the last ones."""


@dataclass(frozen=True)
class FsdpPlan:
    """A job and its memory on a die; `remedies` are by phase."""

    job: FsdpJob
    machine: Machine
    device: FsdpMemory
    remedies: Mapping[str, str] = field(default_factory=lambda: REMEDIES)

    @property
    def outside(self) -> int:
        """Bytes of CANN and of HCCL's communicators: the world's, and an engine's tensor-parallel one."""
        groups = (self.job.dies > 1) + (self.job.rollout_tp > 1)
        return self.machine.outside.cann + 2 * groups * self.machine.outside.hccl_buffer

    def peaks(self) -> dict[str, int]:
        """Return the bytes of a die at the peak of each phase."""
        return {phase: size + self.outside for phase, size in self.device.phases.items()}

    @property
    def left(self) -> float:
        """The share of a die that stays free in every phase."""
        return 1 - max(self.peaks().values()) / self.machine.die

    def device_bytes(self) -> dict[str, int | dict[str, int]]:
        """Return everything about a die in bytes, for programs, like `JobPlan.device_bytes`."""
        parts = asdict(self.device)
        return {"die": self.machine.die, **parts, "outside": self.outside, "tensors": parts["phases"],
                "phases": self.peaks()}  # fmt: skip

    def problems(self) -> list[str]:
        """Return a sentence for each thing that does not fit; empty if everything fits."""
        found = beyond_the_die(self.peaks(), self.machine.die, self.remedies)
        if self.device.kv_tokens < self.job.sequence_tokens:
            found.append(
                f"KV cache: room for {self.device.kv_tokens} tokens, but one sequence may have "
                f"{self.job.sequence_tokens}; raise actor_rollout_ref.rollout.gpu_memory_utilization"
            )
        return found

    def remarks(self) -> list[str]:
        """Return a sentence for each thing that fits but may still cause trouble."""
        if self.problems() or self.left >= SPARE:
            return []
        phase = max(self.peaks(), key=lambda name: self.peaks()[name])
        advice = self.remedies[phase]
        if phase in ("init", "reshard", "rollout") and not self.job.away_optimizer:
            advice = f"set {OPTIMIZER_OFFLOAD}, or {advice}"
        return [f"only {self.left:.0%} of a die are left in {phase}, and {SPARE:.0%} are advised; {advice}"]


def make_fsdp_plan(job: FsdpJob, machine: Machine, remedies: Mapping[str, str] = REMEDIES) -> FsdpPlan:
    """Plan a job on FSDP."""
    return FsdpPlan(job, machine, fsdp_memory(job, machine.die), remedies)


def describe_fsdp(plan: FsdpPlan) -> str:
    """Format the plan as a table."""
    job, device = plan.job, plan.device
    critic = device.critic_weights + device.critic_optimizer
    away = [name for name, moved in (("weights", job.away_parameters), ("optimizer", job.away_optimizer)) if moved]
    lines = [
        f"dies              {job.dies}",
        f"training          FSDP over {job.dies}, {job.elements / 1e9:.3g}e9 parameters",
        *_image_lines(job),
        f"rollout           {job.dies // job.rollout_tp} x TP{job.rollout_tp}",
        f"step              {job.prompts} prompts x {job.responses} = {job.prompts * job.responses} sequences of up to "
        f"{job.sequence_tokens} tokens",
        "",
        "GB a die",
        f"  weights         {device.weights / 1e9:.2f} in training, {device.engine_weights / 1e9:.2f} in rollout",
        f"  gradients       {device.gradients / 1e9:.2f}",
        f"  optimizer       {device.optimizer / 1e9:.2f}",
        *([f"  critic          {critic / 1e9:.2f} of weights and optimizer"] if job.critic else []),
        f"  on the host     {' and '.join(away) or 'nothing'} outside of updates",
        f"  KV cache        {device.kv_cache / 1e9:.2f}: {device.kv_tokens} tokens, "
        f"{device.kv_tokens // job.sequence_tokens} full sequences",
        "",
        f"GB a die at the peak of a phase, of {plan.machine.die / 1e9:.2f}",
        *(f"  {phase:<16}{size / 1e9:.3f}" for phase, size in plan.peaks().items()),
        f"left              {plan.left:.0%} of a die",
        "",
        *([f"DOES NOT FIT: {problem}" for problem in plan.problems()] or ["everything fits"]),
        *(f"but: {remark}" for remark in plan.remarks()),
    ]
    return "\n".join(lines)


def _image_lines(job: FsdpJob) -> list[str]:
    if job.images is None:
        return []
    images = job.images
    return [
        f"images            up to {images.tokens} image tokens a prompt, of {images.tower.patches_per_token} patches; "
        f"{images.blocks / 1e9:.3g}e9 of the parameters are the vision tower's blocks"
    ]
