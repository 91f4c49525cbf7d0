"""The nodes that a run has lost, derived from Ray's list of nodes."""

from __future__ import annotations

import pytest

from verl_patches.trainer.ray_nodes import RayNodes

UNREACHABLE = RuntimeError("ActorUnavailableError: The actor 8fa5 is unavailable: Connection reset by peer")
ITS_NODE = RuntimeError("ActorDiedError: The actor died because its node has died. Node Id: 5c0d")
OTHER = RuntimeError("KeyError: 'prompt'")


class Listed:
    """Nodes a, b and c. Node c was gone before the run; from call `at_call` on, the nodes in `gone` are gone too."""

    def __init__(self, gone: str, at_call: int = 2) -> None:
        self._gone, self._at_call, self.calls = gone, at_call, 0

    def __call__(self) -> list[dict]:
        self.calls += 1
        gone = "c" + (self._gone if self.calls >= self._at_call else "")
        return [{"NodeID": node, "NodeManagerAddress": f"10.0.0.{node}", "Alive": node not in gone} for node in "abc"]


@pytest.mark.parametrize(
    "gone, error, named",
    [
        ("b", UNREACHABLE, "the node 10.0.0.b during"),
        ("b", ITS_NODE, "the node 10.0.0.b during"),
        ("b", OTHER, "the node 10.0.0.b during"),
        ("ab", UNREACHABLE, "the nodes 10.0.0.a, 10.0.0.b during"),
    ],
)
def test_a_node_that_has_gone_is_named(gone, error, named):
    assert named in RayNodes(Listed(gone)).describe_loss(error, 0)


def test_the_head_is_given_time_to_notice_where_a_node_may_be_the_cause():
    assert "10.0.0.b" in RayNodes(Listed("b", at_call=4)).describe_loss(UNREACHABLE, 60)
    listed = Listed("b", at_call=4)
    assert RayNodes(listed).describe_loss(OTHER, 60) is None and listed.calls == 2


@pytest.mark.parametrize("error", [UNREACHABLE, OTHER])
def test_a_node_that_had_gone_before_is_none_of_the_runs(error):
    assert RayNodes(Listed("")).describe_loss(error, 0) is None


def test_a_head_that_does_not_answer_is_not_mistaken_for_a_node():
    answers = [[{"NodeID": "a", "NodeManagerAddress": "10.0.0.a", "Alive": True}]]
    nodes = RayNodes(lambda: answers.pop())
    assert nodes.describe_loss(UNREACHABLE, 0) is None and not answers
