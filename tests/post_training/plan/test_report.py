"""The exact text of a plan, for round numbers."""

import dataclasses

import pytest

from post_training.plan.device import DeviceMemory
from post_training.plan.job import Recomputation
from post_training.plan.outside_torch import OutsideTorch
from post_training.plan.report import HostMemory, JobPlan, Machine, _recomputed, beyond_the_die, describe, host_memory
from post_training.reshard.statistics import Spread
from tests.post_training.plan.test_plan import scaled_plan

GB = 10**9
OUTSIDE = OutsideTorch(300 << 20, 117 << 20, 20 << 20)
MACHINE = Machine(10 * GB, host=45 * GB, disk=200 * GB, outside=OUTSIDE, storage=5 * GB)
PHASES = {"idle": GB, "reshard": 2 * GB, "rollout": 9 * GB, "ref": GB // 2, "update": 19 * GB // 2}


def plan(**changes) -> JobPlan:
    """Make a plan for 8 dies of 10 GB: training TP2 PP2 EP2 DP2, rollout TP2 DP4 EP8, 8 x 4 sequences of 26 tokens."""
    made = scaled_plan()
    device = DeviceMemory(
        weights_training=3 * GB // 2,
        weights_rollout=9 * GB // 4,
        rotary_tables=0,
        gradients=3 * GB,
        optimizer=9 * GB // 2,
        kv_cache=GB // 2,
        kv_tokens=100,
        staging=GB // 4,
        outside=3 * GB // 4,
        phases=PHASES,
    )
    reshard = dataclasses.replace(made.reshard, received=Spread(0.0, 2e9, 4e9), buckets=7)
    host = HostMemory(away=8 * GB, objects=30 * GB, processes=12 * GB)
    return dataclasses.replace(
        JobPlan(made.job, MACHINE, device, reshard, host, weights_on_disk=14 * GB, checkpoint=80 * GB), **changes
    )


def test_a_plan_is_printed_to_the_letter():
    assert describe(plan()).splitlines() == [
        "dies              8 on 1 nodes",
        "training          TP2 PP2 EP2 DP2, layers 31,30",
        "rollout           1 x (TP2 DP4 EP8)",
        "step              8 prompts x 4 = 32 sequences of up to 26 tokens",
        "  an engine       8 sequences, 8 at a time",
        "  a replica       16 sequences, 16 micro batches of 1",
        "",
        "GB a die",
        "  weights         1.50 in training, 2.25 in rollout",
        "  gradients       3.00",
        "  recomputed      nothing",
        "  optimizer       4.50 on the host",
        "  KV cache        0.50: 100 tokens, 3 full sequences",
        "  reshard         2.00 received in 7 collectives, 0.25 staged",
        "",
        "GB a die at the peak of a phase, of 10.00",
        "  idle            1.750",
        "  reshard         2.750",
        "  rollout         9.750",
        "  ref             1.250",
        "  update          10.250",
        "  in each of them 0.750 beside tensors: 8 communicators of 2 x 300 MiB, 2 of 2 x 20 MiB, and 117 MiB of CANN",
        "",
        "host              50 GB a node: 8 away from the dies, up to 30 of Ray's objects, 12 of processes",
        "disk              14 GB of weights; a checkpoint every 20 steps",
        "  a checkpoint    80 GB, 10 a die; 240 GB for 3 at a time",
        "  writing one     16 s at 5 GB/s",
        "",
        "DOES NOT FIT: update: 10.25 GB a die, but a die has 10.00; keep the optimizer's state on the host "
        "(--swap-optimizer), or use more pipeline stages or dies",
        "DOES NOT FIT: host: 50 GB a node, but a node has 45",
        "DOES NOT FIT: disk: 240 GB of checkpoints, but 200 are free; lower "
        "actor_rollout_ref.overlay.checkpoint.keep_last, or set trainer.save_freq=-1",
        "but: KV cache: room for 100 of the 208 tokens of 8 full sequences, so the engine preempts some if all get "
        "that long; lower max_num_seqs or HCCL_BUFFSIZE",
    ]


def test_exact_fit_is_accepted():
    enough = Machine(41 * GB // 4, host=50 * GB, disk=240 * GB)
    assert plan(machine=enough).problems() == [] and "everything fits" in describe(plan(machine=enough))
    for changes in ({"die": enough.die - 1}, {"host": enough.host - 1}, {"disk": enough.disk - 1}):
        assert len(plan(machine=dataclasses.replace(enough, **changes)).problems()) == 1
    assert plan(machine=Machine(41 * GB // 4)).problems() == [], "0 is not known"
    assert beyond_the_die({"ref": 2, "idle": 3, "update": 1}, 2, {"idle": "so"}) == [
        "idle: 0.00 GB a die, but a die has 0.00; so"
    ]


def test_consequences_of_the_job_are_reported():
    def told(**changes) -> str:
        return describe(plan(job=dataclasses.replace(plan().job, **changes)))

    assert "16 sequences, micro batches of at most 4096 tokens" in told(update_tokens=4096)
    assert "  optimizer       4.50\n" in told(swaps_optimizer=False)
    assert "16 sequences, 4 micro batches of 4\n" in told(micro_update=4)
    assert "80 GB, 10 a die; all of them stay\n" in told(keeps=0)
    assert "no checkpoint is written" in describe(
        plan(job=dataclasses.replace(plan().job, saves_every=0), checkpoint=0)
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (None, "nothing"),
        (Recomputation("selective"), "core attention, which frees nothing here"),
        (Recomputation("full", "block", 4), "4 layers of a stage"),
        (Recomputation("full", "uniform", 2), "all layers, in groups of 2"),
    ],
)
def test_recomputation_is_said_in_words(how, words):
    assert _recomputed(dataclasses.replace(plan().job, recomputation=how)) == words


def test_a_hosts_memory_is_what_leaves_the_dies_and_rays_store_and_the_processes():
    device = dataclasses.replace(plan().device)
    for host, objects in ((0, 200 * GB), (100 * GB, 30 * GB), (10**12, 200 * GB)):
        memory = host_memory(plan().job, device, Machine(GB, host=host))
        assert (memory.away, memory.objects, memory.processes) == (8 * device.host, objects, 12 * GB)
        assert memory.total == memory.away + memory.objects + memory.processes


def test_programs_get_the_parts_of_both_counts():
    numbers = plan().device_bytes()
    assert numbers["tensors"] == PHASES and numbers["phases"]["update"] == 41 * GB // 4 and numbers["die"] == 10 * GB
    expected = {
        "communicators": 8,
        "hccl_buffer": 300 << 20,
        "p2p_communicators": 2,
        "p2p_buffer": 20 << 20,
        "cann": 117 << 20,
        "outside": 3 * GB // 4,
        "kv_tokens": 100,
    }
    assert {name: numbers[name] for name in expected} == expected
