"""Waiting for the nodes of a cluster, under a fake clock."""

from scripts.health_checks.cluster import NodeFacts
from tests.scripts.cluster_files import load_script

script = load_script("scripts/internal/wait_for_nodes.py")
wait_for_nodes = script.wait_for_nodes


class Cluster:
    """Nodes that join at given seconds; `sleep` advances the clock."""

    def __init__(self, *joins: tuple[float, str, int]) -> None:
        self.now, self.joins = 0.0, joins

    def list_nodes(self) -> list[dict]:
        return [
            {"Alive": True, "NodeManagerAddress": address, "Resources": {"NPU": float(count)} if count else {}}
            for at, address, count in self.joins
            if at <= self.now
        ]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, nodes: int, timeout: float = 60) -> bool:
        return wait_for_nodes(self.list_nodes, nodes, 16, timeout, 2, clock=lambda: self.now, sleep=self.sleep)


def test_a_late_node_is_waited_for_with_a_line_every_ten_seconds(capsys):
    cluster = Cluster((0, "10.0.0.1", 16), (25, "10.0.0.2", 16))
    assert cluster.wait(2) and 25 <= cluster.now < 28
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "1 of 2 nodes after 10 s: 10.0.0.1",
        "1 of 2 nodes after 20 s: 10.0.0.1",
        "2 of 2 nodes with 16 NPUs each are there: 10.0.0.1, 10.0.0.2",
    ]


def test_the_wait_ends_at_its_bound(capsys):
    cluster = Cluster((0, "10.0.0.1", 16))
    assert not cluster.wait(2, timeout=30) and cluster.now == 30
    assert "1 of 2 nodes after 30 s: 10.0.0.1" in capsys.readouterr().out


def test_a_node_with_too_few_npus_does_not_count_and_is_named(capsys):
    cluster = Cluster((0, "10.0.0.1", 16), (0, "10.0.0.2", 15), (0, "10.0.0.3", 0))
    assert not cluster.wait(3, timeout=10)
    assert "10.0.0.1; 10.0.0.2 has 15 NPUs; 10.0.0.3 has 0 NPUs" in capsys.readouterr().out


def test_a_node_that_has_gone_does_not_count():
    nodes = [{"Alive": False, "NodeManagerAddress": "10.0.0.1", "Resources": {"NPU": 16.0}}]
    times = iter([0.0, 0.0, 9.0])
    assert not wait_for_nodes(lambda: nodes, 1, 16, 5, 1, clock=lambda: next(times), sleep=lambda _: None)


def test_nodes_that_run_other_code_do_not_agree_and_a_clock_is_only_told(capsys):
    def node(address: str, offset: float = 0.0, tree: str = "a") -> NodeFacts:
        return NodeFacts(address, 16, offset, {"torch": "2.5.1"}, tree)

    assert script.agree([node("10.0.0.1"), node("10.0.0.2")], 2, 16) and capsys.readouterr().out == ""
    assert script.agree([node("10.0.0.1"), node("10.0.0.2", offset=9.0)], 2, 16)
    assert "BAD 10.0.0.2 clock 9.00 s apart; set the clocks" in " ".join(capsys.readouterr().out.split())
    assert not script.agree([node("10.0.0.1"), node("10.0.0.2", tree="b")], 2, 16)
    assert "BAD 10.0.0.2 overlay another; copy the same checkout" in " ".join(capsys.readouterr().out.split())


def test_what_ray_says_at_the_start_is_one_line_and_a_code():
    mismatch = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.9.3\n    Python: 3.10.1\n"
        "This process on node 10.0.0.1 was started with:\n    Ray: 2.46.0\n    Python: 3.11.7\n"
    )
    code, line = script.rejection("10.0.0.1:6379", mismatch)
    assert code == 3 and " ".join(line.split()) == (
        "BAD Ray 10.0.0.1:6379 runs Ray 2.9.3 with Python 3.10.1, this node Ray 2.46.0 with Python 3.11.7; "
        "install the same image"
    )
    gone = script.rejection("10.0.0.1:6379", ConnectionError("Could not find a Ray at it.\nAnd why.\n"))
    assert gone == (4, "Ray at 10.0.0.1:6379 does not answer: Could not find a Ray at it.")
    assert script.rejection("10.0.0.1:6379", RuntimeError())[1].endswith("does not answer: RuntimeError")
