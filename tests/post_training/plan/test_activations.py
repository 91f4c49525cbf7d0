"""Planned activations for every kind of recomputation match the meters of emulated dies, and hand-made counts."""

from __future__ import annotations

import dataclasses
import json

import pytest

from post_training.layouts.layout import TrainPlacement
from post_training.models.families import sizes_of, table_for
from post_training.plan.activations import training_activations
from post_training.plan.device import Rank
from post_training.plan.job import Recomputation
from tests.forked import MEGATRON
from tests.post_training.models.megatron.deepseek_v3_checkpoint import configuration
from tests.post_training.plan.test_plan import job
from tests.ranks import run_ranks

LAYERS = 9
SEQUENCES, TOKENS = 128, 8
# With these widths a layer's activations outweigh its weights, and attention and experts do not hide the rest.
SIZES = {
    "num_hidden_layers": LAYERS, "hidden_size": 512, "intermediate_size": 256, "moe_intermediate_size": 64,
    "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
KINDS = {
    "none": None,
    "selective": Recomputation("selective"),
    **{f"block {count}": Recomputation("full", "block", count) for count in (9, 8, 4, 1)},
    **{f"uniform {count}": Recomputation("full", "uniform", count) for count in (1, 3, 9)},
}


def of_megatron(how: Recomputation | None) -> dict:
    """Return the fields of Megatron's configuration for a kind of recomputation."""
    full = how is not None and how.granularity == "full"
    return {
        "recompute_granularity": how and how.granularity,
        "recompute_method": how.method if full else None,
        "recompute_num_layers": how.layers if full else None,
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[dict, list[dict[str, int]]]:
    """The model's config.json, and the measurements of each die: peaks by kind of recomputation, and the state."""
    folder = tmp_path_factory.mktemp("activations")
    config = configuration()
    for name, value in SIZES.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    variants = {name: of_megatron(how) for name, how in KINDS.items()}
    request = {"sequences": SEQUENCES, "tokens": TOKENS, "variants": variants}
    (folder / "request.json").write_text(json.dumps(request))
    run_ranks("tests.post_training.plan.activation_memory_program", 2, folder, imported=MEGATRON)
    return json.loads((folder / "config.json").read_text()), [
        json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)
    ]


def planned(config: dict, how: Recomputation | None) -> int:
    """Return the planned bytes of weights, gradients and activations on the emulator."""
    train = TrainPlacement(tp=2, pp=1, ep=1, dp=1, num_layer_list=(LAYERS,), moe_tp_extend_ep=True)
    sized = dataclasses.replace(
        job("random_init", "+scale=emulated_8_dies", STAGES), sizes=sizes_of(config), table=table_for(config),
        train=train, itemsize=4, micro_update=SEQUENCES, sequence_tokens=TOKENS, recomputation=how,
    )  # fmt: skip
    state = Rank.of(sized.table.megatron(train, 0)).elements * 8
    return state + training_activations(sized, 0)


STAGES = "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list=[31,30]"


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_peak_of_an_update_is_the_measured_one(measured, name):
    """The plan may ask for a little more than is needed, and for less only by what sizes are rounded by."""
    config, dies = measured
    assert 0.98 < planned(config, KINDS[name]) / max(die[name] for die in dies) < 1.025


@pytest.mark.slow
def test_recomputation_of_more_layers_needs_less(measured):
    """Check that 8, 4 and 1 layers differ by far more than the comparison's tolerance."""
    config, dies = measured
    for values in (
        [planned(config, KINDS[f"block {n}"]) for n in (8, 4, 1)],
        [dies[0][f"block {n}"] for n in (8, 4, 1)],
    ):
        assert values[0] * 1.15 < values[1] and values[1] * 1.15 < values[2]


def of_the_cluster(how: Recomputation | None, stage: int = 0) -> int:
    return training_activations(dataclasses.replace(job("true_weight"), recomputation=how), stage)


def test_a_stage_keeps_as_many_micro_batches_as_there_are_stages_behind_it():
    """In 1F1B with 8 stages, the first stage has 8 micro batches in flight and the last has one."""
    by_stage = [of_the_cluster(None, stage) for stage in range(8)]
    # Stages 2 to 6 each have eight layers with experts.
    steps = {before - after for before, after in zip(by_stage[2:6], by_stage[3:7], strict=True)}
    (kept,) = steps
    assert kept > 0
    assert by_stage[2] - 6 * kept == by_stage[6] - 2 * kept > 0
    # The last stage has seven layers, one micro batch, and the logits.
    assert by_stage[7] > kept // 8 * 7


def test_recomputation_decides_activation_memory():
    full = {count: of_the_cluster(Recomputation("full", "block", count), 2) for count in (8, 4, 1)}
    none = of_the_cluster(None, 2)
    assert full[8] < full[4] < full[1] < none
    # Six micro batches are in flight; in each, a layer without recomputation keeps its activations, not just its input.
    assert full[1] - full[4] == pytest.approx(3 / 4 * (full[4] - full[8]), rel=0.05)
    assert of_the_cluster(Recomputation("selective"), 2) == none
    # Recompute more layers than there are, and all of them in one group.
    assert of_the_cluster(Recomputation("full", "block", 80), 2) == full[8]
    assert of_the_cluster(Recomputation("full", "uniform", 1), 2) == full[8]
    whole = of_the_cluster(Recomputation("full", "uniform", 8), 2)
    assert full[8] < whole < none


def test_dense_layers_lie_on_the_stages_of_the_list():
    cluster = job("true_weight")

    def of_second_stage(first: int, dense: int) -> int:
        layers = (first, 8, *cluster.train.num_layer_list[2:])
        train = dataclasses.replace(cluster.train, num_layer_list=layers)
        sizes = dataclasses.replace(cluster.sizes, dense_layers=dense)
        return training_activations(dataclasses.replace(cluster, train=train, sizes=sizes, recomputation=None), 1)

    assert of_second_stage(first=2, dense=3) == of_second_stage(first=3, dense=4) != of_second_stage(first=3, dense=3)
