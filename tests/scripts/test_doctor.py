"""The doctor with stub commands on PATH: the problems that it finds, and the remedy for each."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from ray.exceptions import RayError

from scripts.health_checks import node
from scripts.health_checks.cluster import NodeFacts, _ask_node, compare_nodes, tree_hash
from scripts.health_checks.finding import Finding, ask
from tests.scripts.cluster_files import ROOT, SHIPPED_2026, load_script, write_cluster_file

ADDRESSES = r"1: lo    inet 127.0.0.1/8 scope host lo\n2: enp0    inet 10.0.0.1/24 scope global enp0\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return `says`, which sets what a command prints, on a node that seems to have a real NPU driver."""
    monkeypatch.setattr(node, "emulated", lambda: False)
    tools = tmp_path / "tools"
    tools.mkdir()

    def says(name: str, text: str) -> None:
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)

    says("ip", f"printf '{ADDRESSES}'")
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return says


def remedies(findings) -> dict[str, str]:
    """Return the remedy of every bad finding."""
    return {finding.what: finding.remedy for finding in findings if finding.state == "BAD"}


@pytest.mark.parametrize(("version", "bad"), [("8.2.RC1", False), ("8.1.RC1", True), (None, True)])
def test_cann_is_held_against_its_pin(tmp_path, monkeypatch, version, bad):
    monkeypatch.setattr(node, "emulated", lambda: False)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    if version:
        (tmp_path / "aarch64-linux").mkdir()
        (tmp_path / "aarch64-linux" / "ascend_toolkit_install.info").write_text(f"package_name=x\nversion={version}\n")
    assert bool(node.cann(tmp_path).remedy) is bad


@pytest.mark.parametrize("named", [[], ["cuda"], ["ascend"], ["other", "ascend"]])
def test_a_vllm_that_would_find_no_npu_is_bad(monkeypatch, named):
    monkeypatch.setattr(
        node.importlib.metadata,
        "entry_points",
        lambda group: [EntryPoint(name, "x:y", group) for name in named if group == "vllm.platform_plugins"],
    )
    assert ("assemble_workspace.sh" in node.platform_plugin().remedy) is ("ascend" not in named)


def settings(**changes) -> dict[str, str]:
    given = {"SOCKET_IFNAME": "enp0", "RAY_PORT": "1", "MASTER_ADDR": "127.0.0.1"}
    return given | {"ALLOW_PUBLIC_ADDRESS": "no", "RAY_TLS_DIR": "none"} | changes


def test_the_interface_and_the_port(machine):
    assert not remedies(node.network(settings()))
    assert remedies(node.network(settings(SOCKET_IFNAME="eth9")))["interface"] == "set SOCKET_IFNAME to one of enp0, lo"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert remedies(node.network(settings(RAY_PORT=port))) == {"Ray's port": "choose another RAY_PORT"}


def test_a_public_address_on_any_interface_is_bad_unless_it_is_allowed_or_tls_is_on(machine):
    machine(
        "ip",
        r"printf '1: eth0    inet 8.8.8.8/24 s\n1: eth0    inet 10.9.9.9/24 s\n2: enp0    inet 100.64.0.1/24 s\n'",
    )
    found = remedies(node.network(settings()))
    assert found.keys() == {"public addresses"} and "RAY_TLS_DIR" in found["public addresses"]
    assert not remedies(node.network(settings(ALLOW_PUBLIC_ADDRESS="yes")))
    assert not remedies(node.network(settings(RAY_TLS_DIR="/certificates")))


def test_another_python_is_bad(monkeypatch):
    monkeypatch.setattr(node.sys, "version_info", (3, 12, 1))
    assert remedies(node.python_and_pins())["python"].startswith("use Python 3.11")


def test_limits(monkeypatch):
    monkeypatch.setattr(node, "emulated", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    assert node.limit_of_files().remedy == "ulimit -n 65536"
    assert node.limit_of_locked_memory().remedy == "ulimit -l unlimited"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not node.limit_of_files().remedy and not node.limit_of_locked_memory().remedy


def test_a_pin_that_differs_is_named(monkeypatch):
    assert not remedies(node.python_and_pins())
    monkeypatch.setattr(node, "versions", lambda stack: dict.fromkeys(("torch", "torch-npu", "transformers"), "1.0"))
    found = remedies(node.python_and_pins())
    assert found["torch"] == "install torch==2.5.1" and found["transformers"] == "install transformers==4.51.1"


def test_shared_memory_and_allocator(monkeypatch):
    usage = type("usage", (), {"free": 1 << 20})
    monkeypatch.setattr(node.shutil, "disk_usage", lambda path: usage)
    assert node.shared_memory(Path("/")).remedy.startswith("give the container --shm-size")
    usage.free = 3 * 10**9
    # On a host of 10 GB, Ray's object store takes 3 GB.
    monkeypatch.setattr(node.os, "sysconf", {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 10**7}.__getitem__)
    enough = node.shared_memory(Path("/"))
    assert (enough.detail, enough.remedy) == ("3 GB free", "")
    usage.free -= 1
    assert node.shared_memory(Path("/")).remedy == "give the container --shm-size 3g"
    # Ray takes at most 200 GB, however much memory there is.
    monkeypatch.setattr(node.os, "sysconf", {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 10**9}.__getitem__)
    assert node.shared_memory(Path("/")).remedy == "give the container --shm-size 200g"
    assert "install jemalloc" in node.jemalloc("/no/such").remedy and not node.jemalloc("none").remedy


def test_paths(tmp_path):
    given = {"MODEL_PATH": str(tmp_path), "TRAIN_FILES": "/no/train", "TEST_FILES": "/no/test", "OUTPUT_DIR": "out"}
    found = remedies(node.paths(given))
    assert found.keys() == {"config.json", "tokenizer.json", "TRAIN_FILES", "TEST_FILES"}
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    assert remedies(node.paths(given)).keys() == {"TRAIN_FILES", "TEST_FILES"}


def test_a_folder_for_results_that_cannot_be_written_is_bad(tmp_path, monkeypatch):
    given = {"MODEL_PATH": "/m", "TRAIN_FILES": "/m", "TEST_FILES": "/m", "OUTPUT_DIR": str(tmp_path / "a" / "b")}
    assert "OUTPUT_DIR" not in remedies(node.paths(given))
    # root may write everywhere
    monkeypatch.setattr(node.os, "access", lambda path, mode: mode != os.W_OK)
    assert remedies(node.paths(given))["OUTPUT_DIR"] == f"make {tmp_path} writable, or correct OUTPUT_DIR"


REPORT = """\
ok  python                3.11
ok  torch                 2.5.1 (pin: 2.5.1)
?   vLLM's files          not looked at
ok  vLLM's platform       ascend
ok  CANN                  8.2.rc1 (pin: 8.2.RC1)
BAD NPUs                  0 of 2; 2 are needed: check dmesg and the driver's log, reseat or reset
?   dies in use           npu-smi shows no dies
ok  interface             enp0 10.0.0.1
ok  public addresses      none
ok  Ray's port            1 is free
ok  open files            65536
BAD locked memory         65535 bytes; ulimit -l unlimited
BAD jemalloc              /no/such; install jemalloc, or correct JEMALLOC in the cluster's file
BAD shared memory         2 GB free; give the container --shm-size 200g
ok  config.json           MODEL/config.json
BAD tokenizer.json        MODEL/tokenizer.json; put the model's files there, or correct MODEL_PATH
ok  TRAIN_FILES           MODEL/config.json
BAD TEST_FILES            /no/test; make it with scripts/json_to_parquet.py
ok  OUTPUT_DIR            2 GB free in MODEL; scripts/plan.py says what is needed
"""


def test_the_whole_report_of_a_node(machine, tmp_path, monkeypatch):
    """The report has every line in order: what is well, what is not, and the remedy."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    (tmp_path / "aarch64-linux").mkdir()
    (tmp_path / "aarch64-linux" / "ascend_toolkit_install.info").write_text("version=8.2.rc1\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    machine("npu-smi", "exit 0")
    looked_at = [Finding("torch", "2.5.1 (pin: 2.5.1)"), Finding("vLLM's files", "not looked at", known=False)]
    monkeypatch.setattr(node, "python_and_pins", lambda stack: iter([Finding("python", "3.11"), looked_at[0]]))
    monkeypatch.setattr(node, "installed_files", lambda stack: iter(looked_at[1:]))
    monkeypatch.setattr(node, "platform_plugin", lambda: Finding("vLLM's platform", "ascend"))
    limits = {resource.RLIMIT_NOFILE: (65536, 65536), resource.RLIMIT_MEMLOCK: (65535, 65535)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    free = {tmp_path / "dev/shm": 2 * 10**9, model: 2_400_000_000}
    monkeypatch.setattr(node.shutil, "disk_usage", lambda path: type("usage", (), {"free": free[path]}))
    monkeypatch.setattr(node.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**9}.__getitem__)
    given = settings(DIES_PER_NODE="2", JEMALLOC="/no/such", MODEL_PATH=str(model))
    given |= {"TRAIN_FILES": str(model / "config.json"), "TEST_FILES": "/no/test"}
    found = node.check_node(given | {"OUTPUT_DIR": str(model / "out")}, tmp_path)
    assert "".join(each.line() + "\n" for each in found).replace(str(model), "MODEL") == REPORT


def test_an_emulated_npu_needs_no_locked_memory_and_no_cann(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)  # set by the emulated NPU
    for emulated in (True, False):
        monkeypatch.setattr(node, "emulated", lambda there=emulated: there)
        assert bool(node.limit_of_locked_memory().remedy) is not emulated
        assert bool(node.cann(tmp_path).remedy) is not emulated


@pytest.mark.parametrize(
    ("value", "state"), [("0,1,2,3,4,5,6,7", "BAD"), (",".join(map(str, range(16))), "ok"), (None, None)]
)
def test_inherited_list_of_npus_is_named(monkeypatch, value, state):
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", value)
    lines = [finding.line() for finding in node.visible_npus({"DIES_PER_NODE": "16"})]
    assert [line.split()[0] for line in lines] == ([] if state is None else [state])
    assert state != "BAD" or f"ASCEND_RT_VISIBLE_DEVICES={value}; it shows 8 NPUs, but the job takes 16" in lines[0]


def test_the_report_on_nodes_that_are_asked():
    versions = (("torch", "2.5.1"), ("verl", "0.4.0"))
    others = [facts("b", 8, 1.25, (("torch", "2.4"), ("verl", "0.3")), "z"), facts("c", error="does not answer: x")]
    found = compare_nodes([facts("a", 16, -0.5, versions), *others], 4, 16)
    assert [each.line() for each in found] == [
        "BAD nodes                 3 of 4: a, b, c; start the missing ones",
        "ok  a NPUs                16 of 16",
        "ok  a clock               0.00 s apart",
        "ok  a pins                the same",
        "ok  a overlay             the same",
        "BAD b NPUs                8 of 16; start Ray there with --resources for 16",
        "BAD b clock               1.75 s apart; set the clocks with chrony or ntpd",
        "BAD b pins                torch 2.4 instead of 2.5.1, verl 0.3 instead of 0.4.0; install the same image",
        "BAD b overlay             another; copy the same checkout to every node",
        "BAD c overlay             does not answer: x; put the same checkout under the same path on every node",
    ]
    apart = {offset: compare_nodes([facts(), facts("b", offset=offset)], 2, 16)[-3].remedy for offset in (1.0, 1.01)}
    assert (apart[1.0], bool(apart[1.01])) == ("", True)


def test_a_command_is_asked_for_a_minute_at_most(monkeypatch):
    asked = {}

    def run(command, **options):
        asked.update(options, command=command)
        raise subprocess.TimeoutExpired(command, options["timeout"])

    assert ask("/bin/sh", "-c", "echo said") == "said\n"
    assert ask("/bin/sh", "-c", "echo said; kill -9 $$") is None
    assert ask("/bin/sh", "-c", "echo said; exit 3") is None and ask("/no/such/tool") is None
    monkeypatch.setattr(subprocess, "run", run)
    assert ask("npu-smi", "info") is None and (asked["command"], asked["timeout"]) == (("npu-smi", "info"), 60)


def facts(address="10.0.0.1", npus=16, offset=0.0, versions=(("verl", "0.4.0"),), tree="a", error="") -> NodeFacts:
    return NodeFacts(address, npus, offset, dict(versions), tree, error)


def test_nodes_that_agree_are_well():
    assert not remedies(compare_nodes([facts(), facts("10.0.0.2", offset=0.5)], 2, 16))


@pytest.mark.parametrize(
    ("other", "what", "remedy"),
    [
        (facts("b", npus=8), "b NPUs", "--resources"),
        (facts("b", offset=-3.0), "b clock", "chrony"),
        (facts("b", versions=(("verl", "0.3"),)), "b pins", "the same image"),
        (facts("b", tree="z"), "b overlay", "the same checkout"),
        (facts("b", versions=(), error="does not answer: no module"), "b overlay", "under the same path"),
    ],
)
def test_a_node_that_differs_is_named(other, what, remedy):
    found = remedies(compare_nodes([facts(), other], 2, 16))
    assert found.keys() == {what} and remedy in found[what]


def test_nodes_are_held_against_the_first_that_answers():
    silent, one, two = facts("a", error="does not answer: x"), facts("b", offset=5.0), facts("c", offset=5.2)
    assert remedies(compare_nodes([silent, one, two], 3, 16)).keys() == {"a overlay"}


def test_missing_nodes_are_bad():
    assert remedies(compare_nodes([facts()], 2, 16)) == {"nodes": "start the missing ones"}


def test_the_hash_of_the_overlay_follows_its_files(tmp_path):
    (tmp_path / "overlay").mkdir()
    before = tree_hash(tmp_path)
    (tmp_path / "overlay" / "a.py").write_text("1")
    assert tree_hash(tmp_path) != before == tree_hash(Path("/no/such"))
    for package in ROOT.glob("*_patches"):
        (tmp_path / package.name).mkdir()
        before = tree_hash(tmp_path)
        (tmp_path / package.name / "a.py").touch()
        assert tree_hash(tmp_path) != before, package


def test_the_command_on_the_emulator(tmp_path, capsys, monkeypatch):
    main = load_script("scripts/doctor.py").main
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    given = {"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "auto", "MODEL_PATH": tmp_path, "JEMALLOC": "none"}
    given |= {"TRAIN_FILES": tmp_path / "config.json", "TEST_FILES": tmp_path / "config.json", "DIES_PER_NODE": 2}
    cluster = write_cluster_file(tmp_path / "c.env", OUTPUT_DIR=tmp_path / "out", **given)
    monkeypatch.setattr(node, "OPEN_FILES", 16)
    monkeypatch.setattr(node, "OBJECT_STORE_SHARE", 0.0)
    monkeypatch.setattr(sys.modules[main.__module__], "check_device", lambda: [Finding("event order", "kept")])
    monkeypatch.setenv("NPU_EMULATOR_DEVICES", "2")
    assert main(["--cluster", str(cluster)]) == 0 and "2 emulated" in capsys.readouterr().out
    monkeypatch.setenv("NPU_EMULATOR_DEVICES", "1")
    assert main(["--cluster", str(cluster)]) == 1 and "set NPU_EMULATOR_DEVICES=2" in capsys.readouterr().out
    assert main([]) == 2 and "MASTER_ADDR" in capsys.readouterr().err
    rejected = {
        "/tmp": "/tmp is invalid: not a readable file. Set it to a file of NAME=value lines",
        os.devnull: "not a readable file",
    }
    for path, says in rejected.items():
        assert main(["--cluster", path]) == 2 and says in capsys.readouterr().err
    (tmp_path / "short.env").write_text("NODES=1\n")
    assert main(["--cluster", str(tmp_path / "short.env")]) == 2
    assert "does not set MASTER_ADDR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("foo", "--ray='foo' is invalid. Set it to HOST:PORT"),
        ("a:70000", "Set it to HOST:PORT"),
        ("127.0.0.1:1", "is invalid: no answer"),
    ],
)
def test_a_ray_that_cannot_be_asked_rejected_at_once(tmp_path, capsys, address, says):
    main = load_script("scripts/doctor.py").main
    cluster = write_cluster_file(tmp_path / "c.env", MASTER_ADDR="10.0.0.1", SOCKET_IFNAME="auto", MODEL_PATH=tmp_path)
    assert main(["--cluster", str(cluster), "--ray", address]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_node_that_fails_is_named_with_the_last_line_that_it_said():
    """Ray puts the other process's traceback before it."""

    class Asking:
        def remote(self):
            raise RayError("ray::report()\n  File x\nModuleNotFoundError: no overlay\n")

    found = _ask_node("10.0.0.2", 16, Asking())
    assert (found.address, found.npus) == ("10.0.0.2", 16)
    assert found.error == "does not answer: ModuleNotFoundError: no overlay"


def test_unknown_stack_rejected(capsys):
    with pytest.raises(SystemExit) as ended:
        load_script("scripts/doctor.py").main(["--stack", "2024"])
    assert ended.value.code == 2
    assert "2024" in capsys.readouterr().err


def test_packages_of_another_stack_are_bad(capsys):
    assert load_script("scripts/doctor.py").main(["--stack", "2026", "--no-self-test"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (verl,) = (line for line in lines if "0.9.1" in line and "verl" in line)
    assert verl.startswith("BAD") and "install verl==0.9.1" in verl


def test_nodes_are_asked_for_the_versions_of_the_stack(monkeypatch, tmp_path, capsys):
    doctor, asked = load_script("scripts/doctor.py"), []
    shown = [NodeFacts("10.0.0.1", 16, 0.0, {"verl": "0.9.1"}, "a")]
    monkeypatch.setattr(doctor, "check_address", lambda address: None)
    monkeypatch.setattr(doctor, "ask_nodes", lambda *asking: asked.append(asking) or shown)
    monkeypatch.setattr(doctor, "check_node", lambda settings, job_runs, stack: [Finding("stack", stack)])
    values = {"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "eth0", "MODEL_PATH": tmp_path, "NODES": 1}
    file = write_cluster_file(tmp_path / "cluster.env", SHIPPED_2026, **values)
    ray = ["--ray", "10.0.0.1:6379", "--no-self-test"]
    assert doctor.main(["--stack", "2026", "--cluster", str(file), *ray]) == 0
    assert asked == [("10.0.0.1:6379", ROOT, "2026")] and "stack" in capsys.readouterr().out


def test_file_of_the_cluster_is_that_of_the_stack(capsys):
    assert load_script("scripts/doctor.py").main(["--stack", "2026", "--ray", "10.0.0.1:6379"]) == 2
    assert "a3_256_dies_2026.env: MASTER_ADDR is still the placeholder" in capsys.readouterr().err
