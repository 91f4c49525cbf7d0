"""Manifests for schedulers have the nodes, dies and variables of the cluster's file, and use existing options."""

import copy
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from post_training.environment_files import read_environment

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILE = ROOT / "scripts" / "env" / "a3_256_dies.env"
CLUSTER = read_environment(FILE)
# The launcher's variables; the others in the file are for the software of the job.
LAUNCHERS = re.findall(r"^(\w+)=.*# launcher: ", FILE.read_text(), re.MULTILINE)
NODES, DIES = int(CLUSTER["NODES"]), int(CLUSTER["DIES_PER_NODE"])


def manifest(name):
    return yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())


def containers(name):
    spec = manifest(name)["spec"]
    if name == "volcano_job":
        return [task["template"]["spec"]["containers"][0] for task in spec["tasks"]]
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"]["containers"][0] for group in groups]


def differing(container):
    """Return the variables of the cluster's file that a container lacks or has with another value."""
    given = {each["name"]: each.get("value") for each in container["env"]}
    return [name for name, value in CLUSTER.items() if name not in LAUNCHERS and given.get(name) != value]


@pytest.mark.parametrize("name", ["kuberay_rayjob", "volcano_job"])
def test_every_node_gives_all_its_dies(name):
    for container in containers(name):
        assert container["resources"]["limits"] == container["resources"]["requests"] == {"huawei.com/Ascend910": DIES}


def test_all_nodes_of_the_cluster_are_asked_for():
    volcano = manifest("volcano_job")
    spec = volcano["spec"]
    assert [task["replicas"] for task in spec["tasks"]] == [spec["minAvailable"]] == [NODES]
    assert int(volcano["metadata"]["annotations"]["sp-block"]) == NODES * DIES
    ray = manifest("kuberay_rayjob")["spec"]["rayClusterSpec"]
    (workers,) = ray["workerGroupSpecs"]
    assert {workers[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {NODES - 1}
    for group in (ray["headGroupSpec"], workers):
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {"NPU": DIES}
    slurm = (DEPLOY / "slurm.sh").read_text()
    assert f"--nodes={NODES}\n" in slurm and f"--gres=npu:{DIES}\n" in slurm


def test_the_head_of_the_volcano_job_is_a_name_that_it_gets():
    """Volcano's svc plugin names pods JOB-TASK-INDEX, in the domain JOB."""
    volcano = manifest("volcano_job")
    job, (task,) = volcano["metadata"]["name"], volcano["spec"]["tasks"]
    (container,) = containers("volcano_job")
    arguments = container["args"]
    assert (
        arguments[arguments.index("--master") + 1] == f"{job}-{task['name']}-0.{job}"
        and "svc" in volcano["spec"]["plugins"]
    )


def test_rays_processes_have_the_variables_of_the_clusters_file():
    for container in containers("kuberay_rayjob"):
        assert differing(container) == []
    changed = copy.deepcopy(containers("kuberay_rayjob")[0])
    next(each for each in changed["env"] if each["name"] == "HCCL_BUFFSIZE")["value"] = "200"
    changed["env"] = [each for each in changed["env"] if each["name"] != "VLLM_USE_V1"]
    assert differing(changed) == ["HCCL_BUFFSIZE", "VLLM_USE_V1"]


def test_ray_has_the_version_of_the_locks():
    (version,) = re.findall(
        r"^ray(?:\[\w+\])?==([\d.]+)", (ROOT / "requirements" / "runtime.lock").read_text(), re.MULTILINE
    )
    assert manifest("kuberay_rayjob")["spec"]["rayClusterSpec"]["rayVersion"] == version


def test_launchers_are_called_with_options_that_they_have():
    usage = (ROOT / "scripts" / "internal" / "launch.sh").read_text()
    (container,) = containers("volcano_job")
    words = [*container["command"], *container["args"], *manifest("kuberay_rayjob")["spec"]["entrypoint"].split()]
    options = {word for word in words if word.startswith("--")}
    assert options == {"--cluster", "--master", "--join", "--resume"} and all(
        f"  {option} " in usage for option in options
    )
    launchers = [word.removeprefix("/workspace/overlay/") for word in words if word.endswith(".sh")]
    assert len(launchers) == 2 and all((ROOT / launcher).is_file() for launcher in launchers)


def slurm(folder, *arguments):
    """Run deploy/slurm.sh with fake Slurm commands that print their arguments."""
    # The list exceeds a pipe's buffer, so that reading only its first line would end scontrol with SIGPIPE.
    (folder / "scontrol").write_text(
        '#!/bin/bash\n[[ "$*" == "show hostnames node[3-99999]" ]] && seq --format node%g 3 99999\n'
    )
    (folder / "srun").write_text("#!/bin/bash\nprintf '[%s]' \"$@\"\n")
    for name in ("scontrol", "srun"):
        (folder / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[3-99999]"}
    command = ["bash", str(DEPLOY / "slurm.sh"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_slurm_starts_the_launcher_on_every_node_with_its_first_one_as_the_head(tmp_path):
    launcher = "scripts/train_deepseekv3_256die_true_weight.sh"
    ended = slurm(tmp_path, launcher, "--cluster", "my file", "--", "data.seed=7")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == (
        f"[--kill-on-bad-exit=1][bash][{launcher}][--master][node3][--cluster][my file][--][data.seed=7]"
    )


def test_slurm_job_that_may_lose_nodes_has_a_supervisor_on_each(tmp_path):
    launcher = "scripts/train_deepseekv3_256die_true_weight.sh"
    ended = slurm(tmp_path, "--elastic", "my output", launcher, "--cluster", "my file")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == (
        "[--no-kill][--kill-on-bad-exit=0][python3][scripts/supervise.py][--elastic][--output][my output][--]"
        f"[bash][{launcher}][--master][node3][--cluster][my file]"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no launcher: sbatch deploy/slurm.sh"),
        (["absent.sh"], "absent.sh is not a file in"),
        (["--elastic"], "--elastic needs a folder that all nodes share"),
        (["--elastic", "folder"], "followed by a launcher"),
    ],
)
def test_slurm_without_a_launcher_rejected(tmp_path, arguments, sentence):
    ended = slurm(tmp_path, *arguments)
    assert ended.returncode == 2 and sentence in ended.stderr and not ended.stdout
