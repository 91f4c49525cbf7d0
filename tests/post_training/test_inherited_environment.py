"""A job inherits neither another job's variables nor values that it cannot run with."""

import os
import subprocess
from pathlib import Path

import pytest

from post_training.inherited_environment import (
    EnvironmentRejected,
    check_inherited,
    describe_visible,
    drop_inherited,
    dropped_names,
)

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {
    "RANK": "7", "LOCAL_RANK": "5", "WORLD_SIZE": "9", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "1",
    "RANK_TABLE_FILE": "/x", "TORCHELASTIC_RUN_ID": "a", "VLLM_DP_RANK": "3", "RAY_ADDRESS": "10.9.9.9:6379",
    "WG_BACKEND": "ray", "DEVICE_ID": "3",
}  # fmt: skip
KEPT = {"HCCL_BUFFSIZE": "300", "VLLM_USE_V1": "1", "RANKS": "4", "MY_RANK": "1", "HTTPS_PROXY": "x", "HF_HOME": "/x"}
NPUS = {"ASCEND_RT_VISIBLE_DEVICES": "3", "ASCEND_VISIBLE_DEVICES": "0-7"}


def test_variables_of_other_jobs_dropped():
    environment = {**OTHERS, **KEPT, **NPUS}
    assert drop_inherited(environment, emulated=False) == sorted(OTHERS)
    assert environment == {**KEPT, **NPUS}
    assert drop_inherited(environment, emulated=True) == sorted(NPUS) and environment == KEPT


def test_launcher_drops_the_same_variables():
    """Bash and Python use the same table."""
    script = 'source scripts/lib/terminal.sh; source scripts/lib/inherited.sh; inherited_drop "$PWD"; env'
    environment = {"PATH": os.environ["PATH"], **OTHERS, **KEPT}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    said, *left = done.stdout.splitlines()
    assert said.startswith("ignored in the environment, because they belong to another job: ")
    assert set(said.partition(": ")[2].split()) == set(OTHERS)
    names = {line.partition("=")[0] for line in left}
    assert not names & set(OTHERS) and set(KEPT) <= names


def test_torchrun_sets_nothing_that_is_kept():
    """Compare with the variables that torch's own launcher sets for a rank."""
    from torch.distributed.elastic.agent.server import local_elastic_agent

    source = Path(local_elastic_agent.__file__).read_text()
    worker_env = source.partition("worker_env = {")[2].partition("}")[0]
    named = {word for word in worker_env.split('"')[1::2] if word.isupper()}
    beginnings = tuple(name[:-1] for name in dropped_names() if name.endswith("*"))
    # NCCL's error handling is a user setting, not part of a rank's place in a job.
    named -= {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert "LOCAL_RANK" in named and len(named) >= 10
    assert not {name for name in named if name not in dropped_names() and not name.startswith(beginnings)}


@pytest.mark.parametrize(
    ("name", "value"), [("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"), ("VLLM_PLUGINS", "a,b"), ("PYTHONOPTIMIZE", "1")]
)
def test_impossible_value_rejected_by_name(name, value):
    check_inherited({**OTHERS, **KEPT})
    with pytest.raises(EnvironmentRejected, match=f"^The environment variable {name}={value} is invalid: .* Unset it"):
        check_inherited({name: value})
    check_inherited({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "VLLM_PLUGINS": "ascend", "PYTHONOPTIMIZE": ""})


@pytest.mark.parametrize(
    ("value", "dies", "says"),
    [(None, 16, None), ("0,1", 2, None), ("3", 1, None), ("0,1,2,3,4,5,6,7", 16, "it shows 8 NPUs"),
     ("3", 2, "it shows 1 NPUs"), ("", 2, "not a list"), ("0-7", 8, "not a list"), ("0,0", 2, "not a list")],
)  # fmt: skip
def test_list_of_npus_compared_with_dies(value, dies, says):
    said = describe_visible({} if value is None else {"ASCEND_RT_VISIBLE_DEVICES": value}, dies)
    assert (
        said is None if says is None else says in said and f"the job takes {dies}. Unset it, or set it to 0,1" in said
    )
