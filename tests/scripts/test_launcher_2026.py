"""The multi-node launchers of the stack 2026, with stubs for python3 and ip: what they run and reject."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.scripts.cluster_files import ROOT, SHIPPED_2026
from tests.scripts.test_commands_page import help_of
from tests.scripts.test_documents import commands
from tests.scripts.test_launcher import LAUNCHER, Machine, head, port

__all__ = ["head", "port"]  # fixtures of the other file

JOBS = {
    name: ROOT / "scripts" / f"train_{name}.sh" for name in ("deepseek_v3_671b_256_dies", "qwen3_235b_a22b_128_dies")
}
DEEPSEEK = JOBS["deepseek_v3_671b_256_dies"]
REWARD = ROOT / "verl_patches" / "utils" / "reward" / "rule_reward.py"


@pytest.fixture
def cluster(head) -> Machine:
    """Return the head of a cluster of two nodes."""
    head.launcher, head.shipped = DEEPSEEK, SHIPPED_2026
    return head


def test_head_checks_starts_ray_waits_and_verl_trains(cluster, port):
    code, said = cluster.run("--", "data.seed=7")
    assert code == 0, said
    assert cluster.calls == ["check", "ray start", "wait", "train", "ray ended"]
    asked = [shlex.split(line) for line in (cluster.tools / "arguments").read_text().splitlines()]
    check, _, wait, train = asked
    assert check[:4] == ["-m", "verl_plugin.jobs", "--config-name", "deepseek_v3_671b_256_dies"]
    assert wait[wait.index("--stack") + 1] == "2026"
    folder = f"--config-path={ROOT}/verl_plugin/config"
    assert train[:4] == ["-m", "verl.trainer.main_ppo", folder, "--config-name=deepseek_v3_671b_256_dies"]
    own = train[5:]
    assert check[4:] == own, "what is checked is what trains"
    assert own[:4] == [
        "trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"+ray_kwargs.ray_init.address=127.0.0.2:{port}",
        "actor_rollout_ref.model.path='/weights'",
    ]  # fmt: skip
    assert f"reward.custom_reward_function.path='{REWARD}'" in own and own[-1] == "data.seed=7"
    variables = (cluster.tools / "environment").read_text().splitlines()
    (log,) = [line for line in variables if line.startswith("VERL_FILE_LOGGER_PATH=")]
    assert re.fullmatch(rf".*{re.escape(str(cluster.folder))}/out put/[\d-]+/verl_metrics.jsonl", log)
    for entry in ("HCCL_BUFFSIZE=300", "HCCL_SOCKET_IFNAME=net0", "TASK_QUEUE_ENABLE=1", "RAY_AUTH_MODE=disabled"):
        assert entry in variables
    assert not [line for line in variables if line.startswith("VLLM_USE_V1=")]


def test_dry_run_prints_commands_of_a_start(cluster):
    code, said = cluster.run("--dry-run")
    assert code == 0 and not cluster.lines
    run = [line for line in said.splitlines() if line.startswith("run ")]
    assert [re.search(r"verl_plugin.jobs|start_ray|wait_for_nodes|verl.trainer.main_ppo", line)[0] for line in run] == [
        "verl_plugin.jobs", "start_ray", "wait_for_nodes", "verl.trainer.main_ppo"
    ]  # fmt: skip


def test_run_continues_from_a_step_of_verl(cluster, tmp_path):
    step = tmp_path / "global_step_5"
    step.mkdir()
    assert cluster.run("--dry-run", "--resume", str(step))[0] == 2
    (step / "complete.json").write_text("{}")
    code, said = cluster.run("--dry-run", "--resume", str(step))
    assert code == 0 and f"trainer.resume_from_path='{step}'" in shlex.split(said.splitlines()[-1])


@pytest.mark.parametrize(
    ("launcher", "arguments", "says"),
    [
        (DEEPSEEK, ["--steps", "2"], "--steps and --output are invalid without --emulate"),
        (DEEPSEEK, ["--check"], "MODEL_PATH=/weights is invalid: no config.json there"),
        (DEEPSEEK, ["--emulate", "--steps", "0"], "--steps=0 is invalid. Set it to a whole number, at least 1"),
        (LAUNCHER, ["--emulate"], "--emulate is invalid: scripts/preflight.py checks this job"),
        (LAUNCHER, ["--check"], "--check is invalid: scripts/preflight.py checks this job"),
    ],
)
def test_invalid_options_rejected(cluster, launcher, arguments, says):
    cluster.launcher = launcher
    code, said = cluster.run(*arguments)
    assert code == 2 and not cluster.lines and len(said.splitlines()) == 1 and says in said, said


@pytest.mark.parametrize("job", JOBS)
def test_help_and_default_file_are_of_this_stack(cluster, job):
    cluster.launcher = JOBS[job]
    code, said = cluster.run("--help")
    assert code == 0 and "--emulate" in said and "docs/cluster-2026.md" in said


def test_commands_of_the_guide_have_known_options():
    ours = [line for line in commands((ROOT / "docs" / "cluster-2026.md").read_text()) if " scripts/" in line]
    assert len(ours) >= 10
    for line in ours:
        _, script, *words = shlex.split(line)
        known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", help_of(script)))
        own = words[: words.index("--")] if "--" in words else words
        assert [word for word in own if word.startswith("--") and word not in known] == [], line
