"""Whole processes with the real patches: the prelude, the setup hook, the command line."""

import json
import pickle
import subprocess
import sys

from tests.overlay.conftest import REPOSITORY


def test_the_real_prelude_imports_nothing_of_upstream():
    script = """if True:
        import sys, json, verl_patches.prelude_patch as prelude
        prelude.activate()
        print(json.dumps([name.partition(".")[0] for name in sys.modules]))
    """
    out = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    imported = set(json.loads(out.stdout))
    assert "overlay" in imported
    assert not imported & {
        "torch",
        "verl",
        "vllm",
        "vllm_ascend",
        "megatron",
        "transformers",
        "ray",
        "numpy",
        "torch_npu",
    }


def test_the_setup_hook_travels_to_a_worker():
    from verl_patches import prelude_patch

    assert pickle.loads(pickle.dumps(prelude_patch.activate)) is prelude_patch.activate


def command_line(*arguments):
    command = [sys.executable, "-m", "overlay", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)


def test_the_command_line_lists_and_explains_the_real_patches():
    listed = json.loads(command_line("list", "--json").stdout)
    lines = command_line("list").stdout.splitlines()
    assert len(lines) == len(listed) > 0 and [row["name"] for row in listed] == [line.split()[-1] for line in lines]
    explained = command_line("explain", listed[0]["name"])
    assert listed[0]["why"] in explained.stdout and explained.returncode == 0
    unknown = command_line("explain", "no.such:patch")
    assert unknown.returncode == 2 and "no patch has the name 'no.such:patch'" in unknown.stderr
