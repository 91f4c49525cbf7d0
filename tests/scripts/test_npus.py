"""NPUs as the driver's tools show them: sample output of npu-smi and hccn_tool, from the sources in SOURCES.md."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from post_training.claimed_dies import claimed_dies
from scripts.health_checks import node
from scripts.health_checks.npus import Chip, check_npus, find_tool, link, read_health, read_mapping
from scripts.health_checks.occupied_dies import Process, dies_in_use, read_processes

SAMPLES = Path(__file__).with_name("npu_smi")


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a3_mapping_short", [(0, 0, 0, 0, "Ascend"), (0, 1, 1, 1, "Ascend")]),
        ("a2_mapping_short", [(8, 0, 0, 0, "Ascend"), (9, 0, 1, 1, "Ascend")]),
        ("a3_mapping", [(die // 2, die % 2, die, die, "Ascend910") for die in range(16)]),
        ("a2_mapping", [(die, 0, die, die, "Ascend 910B4") for die in range(4)]),
    ],
)
def test_chips_are_read_by_the_headings(name, expected):
    assert read_mapping(sample(name)) == [Chip(*values) for values in expected]


def test_further_columns_in_another_order_are_read():
    said = "Slot ID  NPU ID  Chip ID  Chip Phy-ID  Chip Name\n1  4  0  9  Ascend950PR\n1  4  1  -  Mcu\n"
    assert read_mapping(said) == [Chip(4, 0, 9, 9, "Ascend950PR")]
    said = "NPU ID  Chip ID  Chip Logic ID  Chip Phy-ID  Chip Name\n4  1  3  11  Ascend 910 x\n"
    assert read_mapping(said) == [Chip(4, 1, 3, 11, "Ascend 910 x")]


@pytest.mark.parametrize(
    "said", ["", "dcmi module initialize failed. ret is -8005\n", "0 0 0 Ascend\n", "NPU ID Chip ID\n0"]
)
def test_non_mapping_has_no_chips(said):
    assert read_mapping(said) == []


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        ("a3_info", [(die // 2, die % 2) for die in range(16)]),
        ("a2_info", [(0, 0), (1, 0)]),
        ("inference_card_info", [(2, 0), (2, 1)]),
    ],
)
def test_health_is_read_from_every_form_of_the_table(name, chips):
    assert read_health(sample(name)) == dict.fromkeys(chips, "OK")
    assert read_health("npu-smi failed\n") == {}


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Install an A3's driver at its usual place outside PATH. Return `says(tool, text)`, which replaces a tool."""
    monkeypatch.setattr(node, "emulated", lambda: False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    places = {"npu-smi": tmp_path / "usr/local/sbin", "hccn_tool": tmp_path / "usr/local/Ascend/driver/tools"}

    def says(name: str, text: str) -> Path:
        places[name].mkdir(parents=True, exist_ok=True)
        (places[name] / name).write_text(f"#!/bin/bash\n{text}\n")
        (places[name] / name).chmod(0o755)
        return tmp_path

    says("npu-smi", shows(sample("a3_info")))
    says("hccn_tool", LINKS)
    return says


def shows(table: str, mapping: str = "a3_mapping", health: str = "exit 1") -> str:
    """Return an npu-smi with that table; `health` runs for `info -t health`, with $4 the card and $6 the chip."""
    return f"""case "$*" in
    "info -m") cat {shlex.quote(f"{SAMPLES}/{mapping}.txt")} ;;
    "info -t health -i "*) {health} ;;
    info) cat <<'TABLE'
{table}
TABLE
    ;;
    *) exit 1 ;;
    esac"""


LINKS = """case "$3" in -link) echo 'link status: UP' ;; -net_health) echo 'net health status: Success' ;; esac"""


def remedies(findings) -> dict[str, str]:
    return {finding.what: finding.remedy for finding in findings if finding.state == "BAD"}


def test_a_healthy_a3_is_well(driver):
    root = driver("hccn_tool", LINKS)
    findings = node.npus(16, root)
    assert [finding.state for finding in findings] == ["ok"] * 33
    assert findings[0].detail == "16 of 16"
    assert findings[16].line() == "ok  die 15 (NPU 7 chip 1) Ascend910, OK"
    assert findings[32].what == "link of die 15" and findings[32].detail == "up, Success"


def test_one_bad_chip_is_named_and_no_other(driver):
    lines = sample("a3_info").splitlines()
    number = next(index for index, line in enumerate(lines) if line.startswith("| 1     11 "))
    for state in ("Alarm", "Critical", "Warning", "UNKNOWN"):
        spoilt = list(lines)
        spoilt[number - 1] = spoilt[number - 1].replace("| OK            |", f"| {state:<14}|")
        root = driver("npu-smi", shows("\n".join(spoilt)))
        found = remedies(check_npus(16, root))
        assert found.keys() == {"die 11 (NPU 5 chip 1)"}
        assert "see npu-smi info -t health -i 5 -c 1" in found["die 11 (NPU 5 chip 1)"]


def test_a_chip_that_the_table_lacks_is_asked_for(driver):
    health = "[[ $5$7 == 30 ]] && echo 'Health Status : Alarm' || echo '   Health : OK'"
    root = driver("npu-smi", shows("no table", health=health))
    assert remedies(check_npus(16, root)).keys() == {"die 6 (NPU 3 chip 0)"}
    root = driver("npu-smi", shows("no table"))
    found = check_npus(16, root)
    assert len(remedies(found)) == 16 and found[1].detail == "Ascend910, no answer"


def test_missing_npus_are_counted(driver):
    root = driver("npu-smi", shows(sample("a2_info"), "a2_mapping_short", "echo 'Health : OK'"))
    found = check_npus(16, root)
    assert found[0].detail == "2 of 16" and "dmesg" in remedies(found)["NPUs"]
    assert not remedies(check_npus(2, root))


@pytest.mark.parametrize(
    ("status", "health", "state", "says"),
    [
        ("DOWN", "Fault", "BAD", "check cable"),
        ("UP", "Fault", "BAD", "does not answer"),
        ("UP", "Receive timeout", "BAD", "does not answer"),
        ("UP", "Init", "ok", ""),
        ("UP", "Detect ip set", "ok", ""),
        ("UP", "Success", "ok", ""),
    ],
)
def test_links_by_state(driver, status, health, state, says):
    """hccn_tool addresses a chip by its physical number."""
    spoilt = (
        f'case "$2$3" in 9-link) echo "link status: {status}" ;; 9-net_health) echo "net health status: {health}" ;; '
    )
    root = driver("hccn_tool", spoilt + f"*) {LINKS} ;; esac")
    found = [finding for finding in check_npus(16, root) if finding.what == "link of die 9"]
    assert [finding.state for finding in found] == [state] and says in found[0].remedy
    assert remedies(check_npus(16, root)).keys() == ({"link of die 9"} if state == "BAD" else set())


def test_links_that_cannot_be_asked_for_are_not_bad(driver):
    root = driver("hccn_tool", "exit 1")
    found = check_npus(16, root)
    assert {finding.state for finding in found} == {"ok", "?"} and not remedies(found)


def test_a_driver_that_does_not_answer_is_bad(driver):
    root = driver("npu-smi", "exit 1")
    assert "install the NPU driver" in remedies(check_npus(2, root))["NPUs"]


def test_a_tool_on_path_comes_first_and_one_that_is_nowhere_keeps_its_name(driver, tmp_path, monkeypatch):
    assert find_tool("hccn_tool", tmp_path) == str(tmp_path / "usr/local/Ascend/driver/tools/hccn_tool")
    assert find_tool("no-such-tool", tmp_path) == "no-such-tool"
    other = tmp_path / "other" / "hccn_tool"
    other.parent.mkdir()
    other.write_text("#!/bin/bash\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    assert find_tool("hccn_tool", tmp_path) == str(other)


def test_a_link_is_asked_for_by_the_physical_number(driver):
    mapping = "NPU ID  Chip ID  Chip Logic ID  Chip Phy-ID  Chip Name\n4  1  3  11  Ascend910\n"
    root = driver("hccn_tool", '[[ $2 == 11 ]] && echo "link status: DOWN" || echo "link status: UP"')
    tool = find_tool("hccn_tool", root)
    (chip,) = read_mapping(mapping)
    assert link(chip, tool).line() == "BAD link of die 3         down; check cable and switch port"


def test_processes_are_read_from_the_last_table():
    assert read_processes(sample("a2_info")) == [Process(0, 0, 602983, "python", 54729)]
    assert read_processes(sample("a3_info")) == read_processes(sample("inference_card_info")) == []
    assert read_processes("") == read_processes("npu-smi failed\n") == []


VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
BUSY = "die 0 by process 602983 (python, 54729 MB)"


@pytest.mark.parametrize(
    ("dies", "environment", "detail", "remedy"),
    [
        (1, {}, BUSY, f"set {VISIBLE}=1, which are free, or wait until that job has ended"),
        (2, {}, BUSY, "wait until that job has ended, or end it"),
        (1, {VISIBLE: "1"}, "none of 1", ""),
        (1, {VISIBLE: "0"}, BUSY, f"set {VISIBLE}=1, which are free, or wait until that job has ended"),
    ],
)
def test_die_with_a_process_is_named_with_those_that_are_free(driver, dies, environment, detail, remedy):
    """On this 910B node another job has the first card; the mapping's second chip is free."""
    table = sample("a2_info").replace("| 0       0  ", "| 8       0  ")  # the mapping's number of the first card
    root = driver("npu-smi", shows(table, "a2_mapping_short"))
    found = dies_in_use(dies, environment, root)
    assert (found.detail, found.remedy, found.state) == (detail, remedy, "BAD" if remedy else "ok")


def test_die_that_a_job_of_ours_holds_is_named_before_it_has_memory(driver, monkeypatch):
    """Between a job's start and its first tensor, npu-smi shows no process."""
    monkeypatch.delenv(VISIBLE, raising=False)
    root = driver("hccn_tool", LINKS)
    (root / "dev").mkdir()
    for number in range(16):
        (root / "dev" / f"davinci{number}").touch()
    given = {"DIES_PER_NODE": "8", VISIBLE: "4,5,6,7,8,9,10,11"}
    assert [finding.line() for finding in node.occupied_dies(given, root)] == ["ok  dies in use           none of 8"]
    with claimed_dies(2, {VISIBLE: "3,5"}, root):
        (found,) = node.occupied_dies(given, root)
        assert f"has die 5 ({root}/dev/davinci5)" in found.remedy and "Set it to 0,1,2,4,6,7,8,9" in found.remedy
        assert found.state == "BAD" and given[VISIBLE] in found.detail


def test_driver_that_does_not_answer_says_nothing_of_dies(driver):
    assert dies_in_use(2, {}, driver("npu-smi", "exit 1")).state == "?"


def test_emulated_dies_are_nobody_elses(monkeypatch):
    monkeypatch.setattr(node, "emulated", lambda: True)
    assert node.occupied_dies({"DIES_PER_NODE": "8"}) == []
