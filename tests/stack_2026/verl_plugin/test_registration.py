"""Two keys of verl enable the hand-over; without them verl is unchanged."""

import os
import subprocess
import sys

import pytest

from verl_plugin.alltoallv.settings import EXTENSION, LIBRARY, AlltoallvSettings

ENGINES = """
import {module}
from verl.workers.engine import EngineRegistry
for backend in ("fsdp2", "fsdp", "megatron"):
    print(backend, EngineRegistry.get_engine_cls("language_model", backend).__name__)
"""

# Prints the class that verl uses, and whether it has the methods of both extensions.
BOTH = """
import verl_plugin.megatron_core, verl_plugin.megatron_float32, verl_plugin.alltoallv.engines
from verl.workers.engine import EngineRegistry, MindspeedEngineWithLMHead
engine = EngineRegistry.get_engine_cls("language_model", "megatron")
print(*(base.__name__ for base in engine.__mro__[:4]), issubclass(engine, MindspeedEngineWithLMHead))
"""


def engines_with(module: str) -> dict[str, str]:
    """Return the engine class of each backend in a fresh process that has imported `module`."""
    command = [sys.executable, "-W", "ignore", "-c", ENGINES.format(module=module)]
    run = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=True)
    rows = [line.split() for line in run.stdout.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[0] in ("fsdp2", "fsdp", "megatron")}


def test_library_registers_engines_beside_those_of_verl():
    upstream = engines_with("verl")
    assert not any("Alltoallv" in name for name in upstream.values())
    assert engines_with(LIBRARY) == upstream | {"fsdp2": "AlltoallvFSDP2", "megatron": "AlltoallvMegatron"}


def test_engine_has_every_extension_that_is_loaded():
    command = [sys.executable, "-W", "ignore", "-c", BOTH]
    run = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=True)
    *_, names = run.stdout.splitlines()
    assert names.split()[:4] == ["AlltoallvMegatron", "AlltoallvMegatron", "AlltoallvExport", "Float32"]
    assert names.split()[-1] == "True"


def test_extension_adds_no_name_that_the_worker_has():
    from vllm_ascend.worker.worker import NPUWorker

    module, name = EXTENSION.rsplit(".", 1)
    extension = getattr(__import__(module, fromlist=[name]), name)
    own = [attribute for attribute in dir(extension) if not attribute.startswith("__")]
    assert "update_weights_from_ipc" in own and not [attribute for attribute in own if hasattr(NPUWorker, attribute)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bucket_megabytes": 0}, "alltoallv.bucket_megabytes=0 is invalid: "),
        ({"bucket_megabytes": True}, "alltoallv.bucket_megabytes=True is invalid: "),
        ({"dies_per_node": 0}, "alltoallv.dies_per_node=0 is invalid: a node needs at least one die."),
        ({"verify": "yes"}, "alltoallv.verify='yes' is invalid. Set it to true or false."),
        (
            {"bucket": 3},
            "alltoallv.bucket is invalid: no such option. Set one of bucket_megabytes, dies_per_node,",
        ),
    ],
)
def test_invalid_settings_rejected(values, said):
    with pytest.raises(ValueError, match="additional_config") as caught:
        AlltoallvSettings.from_additional_config({"alltoallv": values})
    assert said in str(caught.value)


def test_settings_default_where_none_are_given():
    for given in (None, {}, {"weight_nz_mode": 0}, {"alltoallv": None}):
        assert AlltoallvSettings.from_additional_config(given) == AlltoallvSettings()
