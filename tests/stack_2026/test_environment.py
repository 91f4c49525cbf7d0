""".venv-2026/ has the pinned releases, which load on the emulated device, and a reader for every variable."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from overlay.pins import Pins
from rehearsal.environment import ENVIRONMENT_FILES, environment_of
from tests.scripts.test_environment_files import has_reader, variables

PINS = Pins.read(stack="2026")
RELEASES = [upstream for upstream in PINS.upstreams if upstream.release]
IMPORTS = """
import json, sys
import torch
import verl, vllm, vllm_ascend, megatron.core, mbridge, transfer_queue, transformers
from vllm_ascend.distributed.device_communicators.pyhccl_wrapper import HCCLLibrary
from vllm_ascend.utils import get_ascend_device_type
HCCLLibrary()  # without one of its functions vLLM-Ascend moves nothing, and says nothing
print(json.dumps([torch.npu.get_device_name(0), get_ascend_device_type().name]))
"""


@pytest.mark.parametrize("upstream", RELEASES, ids=lambda upstream: upstream.name)
def test_release_is_the_pinned_one(upstream):
    assert version(upstream.distribution) == upstream.release


def test_installed_packages_are_taken_for_this_stack():
    PINS.require_environment()


@pytest.mark.parametrize("name", ["rehearsal_2026.env", "one_node_2026.env", "a3_256_dies_2026.env"])
def test_every_variable_has_the_reader_that_is_named(name):
    found = variables(ENVIRONMENT_FILES["2026"].with_name(name))
    assert len(found) > 5 and [name for name, reader in found if not has_reader(name, reader)] == []


@pytest.mark.parametrize(("chip", "name"), [(None, "Ascend910B3"), ("a2", "Ascend910B3"), ("a3", "Ascend910_9391")])
def test_packages_load_on_the_stated_chip(chip, name):
    environment = os.environ | environment_of("2026", chip)
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[0] == name
