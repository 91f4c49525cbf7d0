"""Jobs that train while they generate: what has been run passes the checks, and everything else is rejected by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
import transfer_queue
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.utils.fsdp_utils import (
    fsdp2_sharded_load_from_cpu,
    fsdp2_sharded_save_to_cpu,
    load_fsdp2_model_to_gpu,
    offload_fsdp2_model_to_cpu,
)

from tests.stack_2026.verl.test_jobs import ACTOR, MODELS, ONE_CARD, ONE_NODE, ROLLOUT
from verl_plugin.jobs import JobError, check_job, compose_job
from verl_plugin.jobs.asynchronous import LOG_LEVEL, rollout_dies

MODE, SEPARATE = "trainer.v1.trainer_mode", "trainer.v1.separate_async"
SAMPLER = "trainer.v1.sampler.custom_sampler"
LIBRARIES = "actor_rollout_ref.model.external_lib"
OWN = "verl_plugin.resume.engines,verl_plugin.alltoallv.engines,verl_plugin.phase_peaks"
# verl's own buffer of answers and its own agent loops, and no checkpoints.
AS_THEY_COME = [f"{SAMPLER}.path=null", f"{SAMPLER}.name=null", f"{ROLLOUT}.agent.agent_loop_manager_class=null"]
AS_THEY_COME += ["trainer.save_freq=-1"]
FSDP = f"{ACTOR}.fsdp_config"
ON_DIES = [f"{FSDP}.param_offload=false", f"{FSDP}.optimizer_offload=false"]
OWN_DIES = [f"{MODE}=separate_async", "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1"]
OWN_DIES += [f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=alltoallv"]
OWN_DIES += [f"{ROLLOUT}.checkpoint_engine.custom_backend_module=verl_plugin.alltoallv.checkpoint_engine"]
OWN_DIES += [f"{LIBRARIES}=[{OWN}]", f"+ray_kwargs.ray_init.runtime_env.env_vars.{LOG_LEVEL}=WARN", *AS_THEY_COME]
SEPARATED = [*OWN_DIES, f"{SEPARATE}.parameter_sync_step=2", *ON_DIES]
ONE_STEP = [f"{SEPARATE}.parameter_sync_step=1", f"{ACTOR}.ppo_mini_batch_size=16"]
# Qwen3-30B-A3B on Megatron; its rollout has 16 dies more.
SIXTEEN_DIES = [*OWN_DIES, f"{SEPARATE}.parameter_sync_step=2", f"{ROLLOUT}.n_gpus_per_node=16"]
ON_HOST = (f"{FSDP}.param_offload=true", f"{FSDP}.offload_policy=true")


@pytest.fixture(autouse=True)
def _no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_LEVEL, raising=False)


def rejected(job: str, overrides: list[str]) -> str:
    """Return the sentence with which a job is rejected."""
    with pytest.raises(JobError) as caught:
        check_job(compose_job(job, overrides), MODELS[job])
    return str(caught.value)


def test_rehearsed_keys_accepted(monkeypatch):
    config = check_job(compose_job(ONE_CARD, SEPARATED), MODELS[ONE_CARD])
    assert rollout_dies(config) == (1, 1) and config["trainer"]["n_gpus_per_node"] == 1
    monkeypatch.setenv(LOG_LEVEL, "ERROR")
    inherited = [key for key in SEPARATED if LOG_LEVEL not in key]
    check_job(compose_job(ONE_CARD, inherited), MODELS[ONE_CARD])
    for key in ON_HOST:  # with one optimizer step verl puts nothing back
        check_job(compose_job(ONE_CARD, [*SEPARATED, *ONE_STEP, key]), MODELS[ONE_CARD])
    check_job(compose_job(ONE_NODE, SIXTEEN_DIES), MODELS[ONE_NODE])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"{MODE}=separate", f"{MODE}=separate is invalid: there is no such trainer"),
        ("trainer.save_freq=5", "trainer.save_freq=5 is invalid: trainer.v1.trainer_mode=separate_async saves"),
        ("trainer.resume_mode=auto", "trainer.resume_mode=auto is invalid: no run has been resumed with"),
        (f"{ROLLOUT}.n_gpus_per_node=0", f"{ROLLOUT}.n_gpus_per_node=0 is invalid"),
        (f"{ROLLOUT}.nnodes=0", f"{ROLLOUT}.nnodes=0 is invalid: with {MODE}=separate_async the rollout has dies"),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", "1 dies are not a multiple"),
        (f"{ROLLOUT}.checkpoint_engine.backend=hccl", "backend=hccl is invalid: training and rollout have dies"),
        (f"{ROLLOUT}.checkpoint_engine.custom_backend_module=null", "verl finds"),
        (f"{LIBRARIES}=[{OWN},verl_plugin.offload.engines]", "which was not run with verl_plugin.offload.engines"),
        (f"ray_kwargs.ray_init.runtime_env.env_vars.{LOG_LEVEL}=INFO", f"{LOG_LEVEL}=INFO is invalid"),
        (f"~ray_kwargs.ray_init.runtime_env.env_vars.{LOG_LEVEL}", f"{LOG_LEVEL}=None is invalid"),
        ("actor_rollout_ref.hybrid_engine=true", "hybrid_engine=True is invalid: training dies that generate too"),
        (f"{SEPARATE}.hybrid_rollout.enable_switch=true", "enable_switch=True is invalid: training dies that"),
        (f"{SEPARATE}.parameter_sync_step=0", "parameter_sync_step=0 is invalid: not a count"),
        (f"{SEPARATE}.parameter_sync_step=4", "=16 is not 4 times actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        ("algorithm.rollout_correction.bypass_mode=true", "bypass_mode=True is invalid"),
        (ON_HOST[0], "loses all updates of a step but the last. Set it to false"),
        (ON_HOST[1], "takes old log-probs from the newest weights. Set it to false"),
        (
            f"{MODE}=colocate_async",
            f"{MODE}=colocate_async is invalid: no step has been run with it here",
        ),
    ],
)
def test_setting_not_run_with_separate_dies_rejected(override, says):
    assert says in rejected(ONE_CARD, [*SEPARATED, override])


def test_optimizer_without_buffers_on_megatron_rejected():
    key = f"{ACTOR}.megatron.use_distributed_optimizer"
    assert f"{key}=False is invalid" in rejected(ONE_NODE, [*SIXTEEN_DIES, f"{key}=false"])


def test_installed_queue_saves_nothing():
    """verl calls it behind the weights, and the run ends."""
    assert not hasattr(transfer_queue, "save_checkpoint")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    torch.npu.set_device(0)
    dist.init_process_group("cpu:gloo,npu:hccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("offloads", [False, True])
def test_offloaded_weights_lose_an_update(one_rank, offloads):
    """verl saves the rollout's weights, then the newest ones, and computes with the former in between."""

    def used() -> None:
        """Do as the engine does around every computation."""
        load_fsdp2_model_to_gpu(model)
        if offloads:
            offload_fsdp2_model_to_cpu(model)

    model = nn.Linear(2, 2, bias=False).to("npu")
    fully_shard(model, mesh=init_device_mesh("npu", (1,)))
    used()
    before = model.weight.to_local().detach().cpu().clone()
    of_rollout = fsdp2_sharded_save_to_cpu(model)
    load_fsdp2_model_to_gpu(model)
    with torch.no_grad():
        model.weight.to_local().add_(1.0)
    used()
    newest = fsdp2_sharded_save_to_cpu(model)
    fsdp2_sharded_load_from_cpu(model, *of_rollout)
    assert torch.equal(model.weight.to_local().cpu(), before)
    used()
    fsdp2_sharded_load_from_cpu(model, *newest)
    assert torch.equal(model.weight.to_local().cpu(), before if offloads else before + 1)
