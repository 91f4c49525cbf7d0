"""Every variable in scripts/env/ has a reader, named on its line, that really reads it."""

import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from post_training.environment_files import read_environment

ROOT = Path(__file__).resolve().parents[2]
# The stack 2026 has its own readers: tests/stack_2026/test_environment.py.
FILES = [file for file in sorted((ROOT / "scripts" / "env").glob("*.env")) if not file.stem.endswith("_2026")]
LINE = re.compile(r"^([A-Z][A-Z0-9_]*)=(.*?)\s+# (\w+): \S.*$")
# Readers without source here, with the variables in their documentation. HCCL and CANN: "Environment Variable
# Reference" of CANN; torch_npu: "Environment variables" of Ascend Extension for PyTorch 7.1.0.
DOCUMENTED = {
    "cann": {"ASCEND_GLOBAL_LOG_LEVEL"},
    "hccl": {
        "HCCL_BUFFSIZE",
        "HCCL_CONNECT_TIMEOUT",
        "HCCL_EXEC_TIMEOUT",
        "HCCL_HOST_SOCKET_PORT_RANGE",
        "HCCL_IF_BASE_PORT",
        "HCCL_NPU_SOCKET_PORT_RANGE",
        "HCCL_OP_EXPANSION_MODE",
    },
    "torch_npu": {"PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE"},
    "python": {"PYTHONUNBUFFERED"},
}
# Distributions with a compiled part that reads a variable.
COMPILED = {"torch": "lib/libtorch_cpu.so", "torch_npu": "lib/libtorch_npu.so", "ray": "_raylet.so"}


def variables(file: Path) -> list[tuple[str, str]]:
    """Return name and reader of every variable; a line in another form fails."""
    found = []
    for text in file.read_text().splitlines():
        if text and not text.startswith("#"):
            match = LINE.match(text)
            assert match, f"{file.name}: {text}"
            found.append((match[1], match[3]))
    return found


def has_reader(name: str, reader: str) -> bool:
    """Return whether `reader` reads the variable: by its source, its compiled part, or its documentation."""
    if reader == "launcher":
        return any(re.search(rf"\b{name}\b", path.read_text()) for path in (ROOT / "scripts" / "lib").glob("*.sh"))
    if name in DOCUMENTED.get(reader, ()):
        return True
    package = find_spec(reader)
    if package is None:
        return False
    folder = Path(package.submodule_search_locations[0])
    if any(name in path.read_text(errors="ignore") for path in folder.rglob("*.py")):
        return True
    # RAY_xyz is the environment variable of the C++ setting xyz.
    names = {name.encode(), name.removeprefix("RAY_").encode()}
    return reader in COMPILED and any(each in (folder / COMPILED[reader]).read_bytes() for each in names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_variable_has_the_reader_that_is_named(file):
    found = variables(file)
    assert len(found) == len(dict(found)) > 5
    assert [name for name, reader in found if not has_reader(name, reader)] == []


# The published recipe's variables; None if it gives no value.
RECIPE = {
    "HCCL_CONNECT_TIMEOUT": None,
    "HCCL_EXEC_TIMEOUT": None,
    "HCCL_IF_BASE_PORT": None,
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_BUFFSIZE": "300",
    "HCCL_OP_EXPANSION_MODE": "AIV",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "TASK_QUEUE_ENABLE": "2",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "VLLM_USE_V1": "1",
    "VLLM_VERSION": "0.9.1",
    "VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE": "1",
    "ASCEND_GLOBAL_LOG_LEVEL": None,
    "RAY_DEDUP_LOGS": "0",
}


def test_the_cluster_has_the_variables_of_the_recipe():
    given = read_environment(ROOT / "scripts" / "env" / "a3_256_dies.env")
    assert {name: given.get(name, "missing") for name in RECIPE} == {
        name: given.get(name) if value is None else value for name, value in RECIPE.items()
    }
    # The overlay sets VLLM_DP_SIZE by the place of each engine.
    assert "VLLM_DP_SIZE" not in given


def test_the_one_variable_of_the_recipe_that_is_left_out_would_have_no_reader():
    """Hydra reads HYDRA_FULL_ERROR when hydra.main runs a program; this entry point composes without it."""
    assert "HYDRA_FULL_ERROR" not in read_environment(ROOT / "scripts" / "env" / "a3_256_dies.env")
    entry = (ROOT / "verl_patches" / "trainer" / "main_ppo.py").read_text()
    assert "hydra.main" not in entry and "initialize_config_dir" in entry


def test_the_shell_and_python_read_a_file_alike(tmp_path):
    file = tmp_path / "some.env"
    file.write_text("# all\n  A=1   # one\nB=/a#b/c d #e # f\n\n#C=3\nD=x=y\t# tab\nE=#5\n F=6 \n")
    script = f"""
        for part in terminal arguments settings cluster; do source {shlex.quote(str(ROOT))}/scripts/lib/$part.sh; done
        cluster_check() {{ :; }}
        cluster_read {file}
        printf '%s\\n' "${{cluster_exports[@]}}"
    """
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    expected = {"A": "1", "B": "/a#b/c d", "D": "x=y", "E": "#5", "F": "6"}
    assert dict(line.split("=", 1) for line in done.stdout.splitlines()) == read_environment(file) == expected


@pytest.mark.parametrize("reader", ["vllm", "ray", "hccl", "launcher", "torch"])
def test_unread_variable_is_found(reader):
    assert not has_reader("ASCEND_NPU_SLEEP_DISABLE", reader)


def test_variables_that_the_launcher_sets_itself_have_readers():
    text = (ROOT / "scripts" / "lib" / "cluster.sh").read_text()
    parts = re.findall(r"cluster_environment\+=\((.*)\)$", text, re.MULTILINE)
    words = " ".join(parts).replace(
        "{HCCL,GLOO,TP}_SOCKET_IFNAME=", "HCCL_SOCKET_IFNAME= GLOO_SOCKET_IFNAME= TP_SOCKET_IFNAME="
    )
    exported = set(re.findall(r"\b([A-Z][A-Z_]+)=", words))
    readers = {"GLOO_SOCKET_IFNAME": "torch", "TP_SOCKET_IFNAME": "torch", "RAY_USE_TLS": "ray"}
    readers |= {name: "ray" for name in ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")}
    # HCCL's documentation, and the dynamic linker's.
    elsewhere = {"HCCL_SOCKET_IFNAME", "LD_PRELOAD"}
    assert exported == readers.keys() | elsewhere
    assert [name for name, reader in readers.items() if not has_reader(name, reader)] == []
