"""Shards converted from an FP8 checkpoint load in the training model and give transformers' logits on the source."""

import json
import shutil

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from tests.forked import MEGATRON
from tests.post_training.checkpoint.reference import ReferenceShards, ShardLayout, dequantised, load_folder
from tests.post_training.checkpoint.synthetic import Synthetic
from tests.post_training.checkpoint.tools import cast, convert
from tests.post_training.models.megatron.deepseek_v3_checkpoint import configuration, make_batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

RANKS = 4
TOLERANCE = 2e-5
NOTICEABLE = 1e-3
LAYOUTS = {
    "tensor2_expert2": ShardLayout(tp=2, ep=2, stages=(3,), tp_extend_ep=True),
    "expert4": ShardLayout(ep=4, stages=(3,), tp_extend_ep=True),
    "tensor2_pipeline2": ShardLayout(tp=2, pp=2, stages=(2, 1), tp_extend_ep=True),
    "pipeline2_expert2": ShardLayout(pp=2, ep=2, stages=(2, 1), tp_extend_ep=True),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    source = Synthetic(configuration()).write(folder / "fp8")
    assert cast(source, folder / "bf16") == 0
    for name, layout in LAYOUTS.items():
        assert convert(source, folder / name, *layout.options()) == 0
    first = LAYOUTS["tensor2_expert2"]
    assert (
        convert(Synthetic(configuration(), seed=1).write(folder / "other"), folder / "other_weights", *first.options())
        == 0
    )
    weights = dequantised(load_folder(source))
    ReferenceShards(weights, Synthetic(configuration()).shape, first).save_as_published(folder / "published")
    for name in ("damaged", "unfinished"):
        shutil.copytree(folder / "tensor2_expert2", folder / name)
    for shard in (folder / "damaged").rglob("*.pt"):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    manifest = folder / "unfinished" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"complete": False}))
    model = DeepseekV3ForCausalLM._from_config(configuration(), attn_implementation="eager").float().eval()
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    batch = make_batch()
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        logits = model(attention_mask=batch["attention_mask"].long(), **inputs).logits
    torch.save({"batch": batch, "logits": logits}, folder / "reference.pt")
    run_ranks("tests.post_training.checkpoint.shard_program", RANKS, folder, imported=MEGATRON)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers_on_the_source(results, layout):
    errors = [error for rank in results if (error := rank["logits"][layout]) is not None]
    assert errors and max(errors) < TOLERANCE


def test_shards_of_the_published_converter_give_the_same_logits(results):
    assert max(rank["published"] for rank in results) < TOLERANCE


def test_weights_of_another_model_are_noticed(results):
    assert min(rank["other_weights"] for rank in results) > NOTICEABLE


@pytest.mark.parametrize(
    ("name", "words"),
    [("damaged", "the file has changed"), ("expert4", "have the layout"), ("unfinished", "complete conversion")],
)
def test_shards_that_are_not_the_ones_rejected(results, name, words):
    assert all(words in rank["rejected"][name] for rank in results), [rank["rejected"][name] for rank in results]
