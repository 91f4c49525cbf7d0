"""The statistics of a reshard plan: the recipe's 256 dies against the goals, and the messages for invalid options."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from post_training.report.palette import LIGHT
from post_training.reshard.statistics import PerTensorStatistics, PlanStatistics, Spread
from scripts.reshard_plan import Ways, draw, main, table

CLUSTER_TRAIN = "tp4,pp8,ep8,tp_extend,layers=7/7/8/8/8/8/8/7"
SMALL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "vocab_size": 128,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def statistics(capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    assert main([*options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(("rollout", "experts"), [("tp2,ep256", 5.09e9), ("tp2,ep128,instances2", 10.18e9)])
def test_the_cluster_reaches_its_goals(capsys: pytest.CaptureFixture[str], rollout: str, experts: float) -> None:
    found = statistics(capsys, "--train", CLUSTER_TRAIN, "--rollout", rollout)
    for way in (found["direct"], found["relayed"]):
        assert way["received"] == way["bound_received"]
        assert way["expert_received"] == way["bound_expert_received"]
        assert way["expert_received"]["average"] == pytest.approx(experts, rel=1e-3)
        assert way["staging_peak"] <= 2 * way["bucket_bytes"]
        assert way["object_collectives"] == 0
    relayed = found["relayed"]
    assert relayed["sent"]["maximum"] <= 1.05 * relayed["sent"]["average"]
    assert relayed["collectives"] == relayed["buckets"] + 1 <= 32
    assert relayed["node_ingress"]["average"] < 0.5 * found["direct"]["node_ingress"]["average"]
    if rollout == "tp2,ep256":
        # Computed by hand from the recipe's description: 73.68 GB per die, 40.71 GB of it experts, 4.17 GB staged.
        published = found["per_tensor"]
        assert published["received"]["average"] == pytest.approx(73.68e9, rel=1e-4)
        assert published["expert_received"]["average"] == pytest.approx(40.71e9, rel=1e-4)
        assert published["staging_peak"] == pytest.approx(4.17e9, rel=1e-3)


def test_a_model_file_a_table_and_a_picture(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "traffic.png"
    options = [
        "--model",
        model,
        "--train",
        "tp2,pp2,tp_extend,layers=2/2",
        "--rollout",
        "tp2,ep8",
        "--plot",
        str(picture),
    ]
    assert main([*options, "--dies-per-node", "4", "--bucket", "1MiB"]) == 0
    printed = capsys.readouterr().out
    assert "received, GB" in printed and "per tensor" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


TABLE = """\
GB are min / avg / max a die  direct              relayed in node        per tensor
received, GB                  1.00 / 1.25 / 1.50  11.00 / 11.25 / 11.50  21.00 / 21.25 / 21.50
lower bound, GB               3.00 / 3.25 / 3.50  13.00 / 13.25 / 13.50
received / bound              0.385               0.849                  6.538
experts received, GB          4.00 / 4.25 / 4.50  14.00 / 14.25 / 14.50  22.00 / 22.25 / 22.50
experts, lower bound, GB      5.00 / 5.25 / 5.50  15.00 / 15.25 / 15.50
sent, GB                      2.00 / 2.25 / 2.50  12.00 / 12.25 / 12.50  -
sent, max / avg               1.111               1.020                  -
into a node, GB               6.00 / 6.25 / 6.50  16.00 / 16.25 / 16.50  -
collectives                   4                   4                      55
object collectives            0                   0                      66
peak staging, GB              7.50                7.50                   4.17
regions received              2                   2                      -
planning, CPU s a rank        1.38                1.38                   -"""


def plan_with(lowest: int) -> PlanStatistics:
    """Return statistics that all differ: received, sent, both bounds and into a node, from `lowest` GB upwards."""
    received, sent, bound, experts, bound_experts, node = (gigabytes(lowest + number) for number in range(6))
    regions = Spread(1, 2.4, 3)
    return PlanStatistics(
        8, received, sent, bound, experts, bound_experts, node, 3, 4, 0, 7_500_000_000, 1, regions, 1.375
    )


def gigabytes(lowest: float) -> Spread:
    return Spread(lowest * 1e9, (lowest + 0.25) * 1e9, (lowest + 0.5) * 1e9)


def test_the_table_has_a_column_for_each_way() -> None:
    per_tensor = PerTensorStatistics(gigabytes(21), gigabytes(22), 55, 66, 4_170_000_000)
    assert table(Ways(plan_with(1), plan_with(11), per_tensor)) == TABLE
    without = table(Ways(plan_with(1), plan_with(11), None)).splitlines()
    assert without[0] == TABLE.splitlines()[0] and without[1].endswith(" / 11.50  -")
    assert without[9].split() == ["collectives", "4", "4", "-"]


def test_a_dense_model_has_no_expert_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = statistics(capsys, "--model", "qwen2.5-0.5b", "--train", "tp2,pp2,dp2,tp_extend", "--rollout", "tp2,dp4")
    assert found["direct"]["received"] == found["direct"]["bound_received"]
    assert found["direct"]["expert_received"]["maximum"] == found["per_tensor"]["expert_received"]["maximum"] == 0


def test_experts_cut_over_tensor_ranks_have_no_published_algorithm(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "per_tensor" not in statistics(capsys, "--model", model, "--train", "tp2,pp2", "--rollout", "tp2,ep8")


def test_json_of_another_kind_is_no_model(tmp_path, capsys):
    (tmp_path / "list.json").write_text("[1]")
    assert main(["--model", str(tmp_path / "list.json"), "--train", "tp4", "--rollout", "tp2,ep8"]) == 2
    assert "is JSON with a list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--train", "tp4,pp8", "--rollout", "tp2,ep256"], ["61 layers", "pp8"]),
        (["--train", "tp4,xx8", "--rollout", "tp2,ep256"], ["--train", "xx8"]),
        (["--train", "tp4", "--rollout", "tp2,ep"], ["--rollout", "'ep'"]),
        (["--train", "tp3,dp2", "--rollout", "tp2,ep8"], ["6 ranks", "8"]),
        (["--train", "tp4,pp2,layers=30/x", "--rollout", "tp2,ep8"], ["layers=30/x"]),
        (["--model", "nowhere.json", "--train", "tp4", "--rollout", "tp2,ep8"], ["nowhere.json"]),
        (["--train", "tp4,pp1", "--rollout", "tp2,ep8", "--bucket", "1 GB"], ["1 GB"]),
        (["--train", "tp4,pp1,tp_extend", "--rollout", "tp2,ep8", "--bucket", "4KiB"], ["a bucket of 4096 bytes"]),
        (["--train", "tp4,pp2,layers=30/30", "--rollout", "tp2,ep8"], ["does not add up"]),
        (["--train", "tp4", "--rollout", "tp2,ep8", "--itemsize", "0"], ["--itemsize=0 is invalid", "at least 1"]),
        (["--train", "tp4", "--rollout", "tp2,ep8", "--itemsize", "-2"], ["--itemsize=-2 is invalid"]),
        (["--train", "tp4", "--rollout", "tp2,ep8", "--dies-per-node", "0"], ["--dies-per-node=0 is invalid"]),
        (["--train", "tp4", "--rollout", "tp2,ep8", "--dies-per-node", "-3"], ["--dies-per-node=-3 is invalid"]),
    ],
)
def test_wrong_options_are_one_sentence(
    options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert all(word in message for word in words), message


def test_the_picture_has_what_each_die_sends_and_receives(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.backends.backend_agg.FigureCanvasAgg.print_png", lambda canvas, path: drawn.append(canvas.figure)
    )
    remote, relayed = numpy.array([[0, 1], [2, 0]]), numpy.array([[0, 3], [0, 0]])
    flows = [SimpleNamespace(between=lambda dies, part=part: part * 1e9) for part in (remote, relayed)]
    draw(SimpleNamespace(remote=flows[0], relay=flows[1], world_size=2), tmp_path / "x.png")
    by_pair, by_die = drawn[0].axes[:2]
    assert by_pair.images[0].get_array().tolist() == [[0, 4], [2, 0]]
    assert {line.get_label(): list(line.get_ydata()) for line in by_die.lines} == {"sent": [4, 2], "received": [2, 4]}
    assert by_die.get_ylim()[0] == 0
    assert [line.get_color() for line in by_die.lines] == list(LIGHT[:2]), "the colours of report.html"
