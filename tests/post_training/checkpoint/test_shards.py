"""FP8 -> BF16 -> shards -> HuggingFace is the identity, and shards equal those of the naive reference."""

import json
import shutil
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from post_training.checkpoint import records, regions
from scripts import convert_ckpt_deepseek3
from tests.post_training.checkpoint.reference import ReferenceShards, ShardLayout, dequantised, load_folder
from tests.post_training.checkpoint.synthetic import Synthetic, small_config
from tests.post_training.checkpoint.tools import cast, convert, export, verify

ONE, TWO, FOUR, UNEVEN, THREE = (4,), (2, 2), (1, 1, 1, 1), (3, 1), (1, 2, 1)
EXTENDED = {"tp_extend_ep": True}
LAYOUTS = [
    ShardLayout(stages=ONE),
    ShardLayout(stages=ONE, grouped=False),
    ShardLayout(stages=ONE, mtp=True),
    ShardLayout(stages=ONE, mm_split=True),
    ShardLayout(tp=2, stages=ONE),
    ShardLayout(tp=4, stages=ONE, mm_split=True),
    ShardLayout(tp=8, stages=ONE, **EXTENDED),
    ShardLayout(tp=4, stages=ONE, grouped=False),
    ShardLayout(tp=2, stages=ONE, mtp=True, grouped=False, mm_split=True),
    ShardLayout(ep=2, stages=ONE),
    ShardLayout(ep=8, stages=ONE, mtp=True),
    ShardLayout(ep=4, stages=ONE, grouped=False),
    ShardLayout(pp=2, stages=UNEVEN),
    ShardLayout(pp=2, stages=TWO, mtp=True),
    ShardLayout(pp=4, stages=FOUR, mm_split=True, mtp=True),
    ShardLayout(pp=3, stages=THREE, grouped=False),
    ShardLayout(pp=2, stages=FOUR, chunks=2),
    ShardLayout(pp=2, stages=FOUR, chunks=2, mtp=True, mm_split=True),
    ShardLayout(pp=1, stages=FOUR, chunks=4),
    ShardLayout(tp=2, ep=2, stages=ONE),
    ShardLayout(tp=2, ep=2, stages=ONE, **EXTENDED),
    ShardLayout(tp=2, ep=4, stages=ONE, **EXTENDED),
    ShardLayout(tp=4, ep=2, stages=ONE, mtp=True, **EXTENDED),
    ShardLayout(tp=2, ep=4, stages=ONE, grouped=False),
    ShardLayout(tp=2, pp=2, stages=UNEVEN),
    ShardLayout(tp=2, pp=2, stages=FOUR, chunks=2, mtp=True),
    ShardLayout(ep=2, pp=3, stages=(2, 1, 1), mm_split=True),
    ShardLayout(tp=2, pp=2, ep=2, stages=UNEVEN, **EXTENDED),
    ShardLayout(tp=2, pp=2, ep=2, stages=TWO, mtp=True),
    ShardLayout(tp=2, pp=2, ep=2, stages=(1, 3), mtp=True, mm_split=True, **EXTENDED),
    ShardLayout(tp=2, pp=4, ep=4, stages=FOUR, **EXTENDED),
    ShardLayout(tp=4, pp=2, ep=2, stages=UNEVEN, mm_split=True, **EXTENDED),
    ShardLayout(tp=2, pp=2, ep=2, stages=FOUR, chunks=2, **EXTENDED),
    ShardLayout(tp=2, pp=3, ep=2, stages=(1, 1, 2), grouped=False, mm_split=True, mtp=True),
]


def layout_name(layout: ShardLayout) -> str:
    sizes = f"tp{layout.tp}pp{layout.pp}ep{layout.ep}x{layout.chunks}"
    flags = ("grouped", "tp_extend_ep", "mm_split", "mtp")
    return "-".join([sizes, "_".join(map(str, layout.stages)), *(flag for flag in flags if getattr(layout, flag))])


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    return Synthetic(small_config(num_nextn_predict_layers=1)).write(tmp_path_factory.mktemp("fp8") / "fp8")


@pytest.fixture(scope="module")
def bfloat16(quantised, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16") / "bf16"
    assert cast(quantised, folder) == 0
    return folder


@pytest.fixture(scope="module")
def weights(quantised):
    return dequantised(load_folder(quantised))


def assert_same(found: dict, expected: dict, where: str) -> None:
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[name], value, where)
        elif isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), f"{where}: {name}"
            assert torch.equal(found[name].view(torch.uint8), value.contiguous().view(torch.uint8)), f"{where}: {name}"
        else:
            assert found[name] == value, f"{where}: {name}"


def test_there_are_enough_layouts():
    assert len({layout_name(layout) for layout in LAYOUTS}) >= 30


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_round_trip_is_the_identity(layout, quantised, weights, tmp_path):
    """Use one process, since forking this large one takes longer than the work."""
    direct, exported = tmp_path / "direct", tmp_path / "exported"
    assert convert(quantised, direct, *layout.options(), workers=1) == 0
    reference = ReferenceShards(weights, Synthetic(small_config(num_nextn_predict_layers=1)).shape, layout)
    for pp in range(layout.pp):
        for ep in range(layout.ep):
            for tp in range(layout.tp):
                path = reference.path(tp, pp, ep)
                assert_same(torch.load(direct / path, weights_only=True), reference.content(tp, pp, ep), path)
    assert len(list(direct.rglob("*.pt"))) == layout.tp * layout.pp * layout.ep
    assert (direct / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert export(direct, quantised, exported, "--max-file-gb", "0.001", workers=1) == 0
    expected = weights if layout.mtp else {n: w for n, w in weights.items() if not n.startswith("model.layers.4.")}
    assert_same(load_folder(exported), expected, "exported")
    config = json.loads((exported / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == int(layout.mtp) and "quantization_config" not in config
    assert len(list(exported.glob("*.safetensors"))) > 2


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.pt")}


@pytest.mark.parametrize("layout", LAYOUTS[::4], ids=layout_name)
def test_a_cast_gives_the_same_shards_byte_for_byte(layout, quantised, bfloat16, tmp_path):
    """The cast is converted with two processes, the FP8 source with one."""
    direct, indirect = tmp_path / "direct", tmp_path / "indirect"
    assert convert(quantised, direct, *layout.options(), workers=1) == 0
    assert convert(bfloat16, indirect, *layout.options()) == 0
    assert contents(direct) == contents(indirect) and len(contents(direct)) == layout.tp * layout.pp * layout.ep


@pytest.fixture(scope="module")
def shards(quantised, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "shards"
    assert convert(quantised, folder, *LAYOUTS[27].options()) == 0
    return folder


def test_every_pair_of_kinds_compares_equal(quantised, bfloat16, shards, tmp_path, capsys):
    other = tmp_path / "other"
    assert convert(bfloat16, other, *LAYOUTS[-1].options()) == 0
    for left, right in ((quantised, bfloat16), (quantised, shards), (shards, bfloat16), (shards, other)):
        assert verify(left, right) == 0
        assert "equal: " in capsys.readouterr().out


def test_the_same_bytes_of_another_type_are_another_tensor(bfloat16, tmp_path, capsys):
    other, name = shutil.copytree(bfloat16, tmp_path / "other"), "model.norm.weight"
    path = other / json.loads((other / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].view(torch.float16)}, path, {"format": "pt"})
    assert verify(bfloat16, other) == 1
    said = capsys.readouterr()
    assert f"{name}: torch.bfloat16 " in said.out + said.err and "torch.float16 " in said.out + said.err


def test_shards_of_others_are_read_with_the_layout_given(quantised, weights, tmp_path):
    layout = ShardLayout(tp=2, pp=2, ep=2, stages=(3, 1), tp_extend_ep=True, mm_split=True)
    ReferenceShards(weights, Synthetic(small_config(num_nextn_predict_layers=1)).shape, layout).save(tmp_path / "saved")
    options = [option.replace("--target-", "--source-") for option in layout.options()]
    assert verify(quantised, tmp_path / "saved", "--hf-dir", str(quantised), *options) == 0
    assert export(tmp_path / "saved", quantised, tmp_path / "exported", *options) == 0
    assert verify(quantised, tmp_path / "exported") == 0
    wrong = [option.replace("3,1", "2,2") for option in options]
    assert verify(quantised, tmp_path / "saved", "--hf-dir", str(quantised), *wrong) == 2


PUBLISHED = [
    ShardLayout(tp=2, pp=2, ep=2, stages=(3, 1), tp_extend_ep=True),
    ShardLayout(tp=2, ep=2, stages=ONE, grouped=False, mm_split=True, mtp=True),
    ShardLayout(pp=2, stages=FOUR, chunks=2, mtp=True),
]


@pytest.mark.parametrize("layout", PUBLISHED, ids=layout_name)
def test_shards_of_the_published_converter_verify_and_export(layout, quantised, weights, tmp_path):
    shape = Synthetic(small_config(num_nextn_predict_layers=1)).shape
    ReferenceShards(weights, shape, layout).save_as_published(tmp_path / "saved")
    options = [option.replace("--target-", "--source-") for option in layout.options()]
    assert verify(quantised, tmp_path / "saved", "--hf-dir", str(quantised), *options) == 0
    assert export(tmp_path / "saved", quantised, tmp_path / "exported", *options) == 0
    assert verify(quantised, tmp_path / "exported") == 0


def test_a_virtual_pipeline_of_one_chunk_a_stage_is_called_model0_by_the_published_converter(
    quantised, weights, tmp_path, capsys
):
    layout = ShardLayout(pp=2, stages=TWO)
    saved = tmp_path / "saved"
    ReferenceShards(weights, Synthetic(small_config()).shape, layout).save(saved)
    for path in saved.rglob("*.pt"):
        content = torch.load(path, weights_only=True)
        torch.save({"model0": content.pop("model")} | content, path)
    options = ["--hf-dir", str(quantised), "--moe-grouped-gemm", "--source-pipeline-parallel-size", "2"]
    assert verify(quantised, saved, *options, "--num-layers-per-virtual-pipeline-stage", "2") == 0
    assert verify(quantised, saved, *options, "--num-layers-per-virtual-pipeline-stage", "1") == 2
    assert "does not contain 2 state dict(s)" in capsys.readouterr().err


def test_the_factory_of_a_published_state_dict_is_not_called(quantised, weights, tmp_path):
    ReferenceShards(weights, Synthetic(small_config()).shape, ShardLayout(stages=ONE)).save(tmp_path / "saved")
    (path,) = (tmp_path / "saved").rglob("*.pt")
    state = torch.load(path, weights_only=True)["model"]
    state.pop("output_layer.weight")  # looking it up would call the factory
    torch.save({"model": defaultdict((tmp_path / "ran").touch, state)}, path)
    options = ["--hf-dir", str(quantised), "--moe-grouped-gemm"]
    assert verify(quantised, tmp_path / "saved", *options) == 2
    assert not (tmp_path / "ran").exists()


def views_of_buffers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Store tensors as Megatron's DDP keeps parameters: as views of one buffer per dtype."""
    views = {}
    for dtype in {tensor.dtype for tensor in state.values()}:
        mine = {name: tensor for name, tensor in state.items() if tensor.dtype == dtype}
        buffer = torch.cat([tensor.flatten() for tensor in mine.values()])
        parts = buffer.split([tensor.numel() for tensor in mine.values()])
        views |= {name: part.view(mine[name].shape) for name, part in zip(mine, parts, strict=True)}
    return views


@pytest.mark.parametrize("kept", [dict, views_of_buffers], ids=["tensors", "views of buffers"])
def test_checkpoints_that_verl_saves_are_read(quantised, weights, tmp_path, kept):
    """verl writes a list of state dicts to model/mp_rank_*/model.pt, with parameters and extra states as values."""
    layout = ShardLayout(tp=2, ep=2, stages=(4,), tp_extend_ep=True)
    reference = ReferenceShards(weights, Synthetic(small_config(num_nextn_predict_layers=1)).shape, layout)
    for ep in range(2):
        for tp in range(2):
            content = kept(reference.content(tp, 0, ep)["model"])
            state = {name: torch.nn.Parameter(tensor) for name, tensor in content.items()}
            path = tmp_path / "actor" / "model" / f"mp_rank_{tp:02d}_{ep:03d}" / "model.pt"
            path.parent.mkdir(parents=True)
            torch.save([state | {"decoder.layers.0.mlp._extra_state": None}], path)
    options = [option.replace("--target-", "--source-") for option in layout.options()]
    assert verify(quantised, tmp_path / "actor", "--hf-dir", str(quantised), *options) == 0
    (tmp_path / "actor/model/mp_rank_00_001/model.pt").unlink()
    assert verify(quantised, tmp_path / "actor", "--hf-dir", str(quantised), *options) == 2


def test_nothing_in_an_archive_is_run(tmp_path, quantised, capsys):
    """An archive that makes torch.load call a function is rejected by this reader as one without a state dict."""

    class Harmful:
        def __reduce__(self):
            return (tmp_path / "ran").write_text, ("x",)

    folder = tmp_path / "saved" / "iter_0000001" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": Harmful()}, folder / "model_optim_rng.pt")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("1")
    assert verify(quantised, tmp_path / "saved", "--hf-dir", str(quantised), "--moe-grouped-gemm") == 2
    assert "state dict" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    torch.load(folder / "model_optim_rng.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


def largest_buffer(folder, experts: int, layers: int) -> int:
    config = small_config(n_routed_experts=experts, num_hidden_layers=layers)
    source = Synthetic(config, files=1).write(folder / f"{experts}x{layers}")
    options = convert_ckpt_deepseek3.parse_arguments(
        ["--load-dir", str(source), "--save-dir", str(folder / "output"), "--moe-grouped-gemm"]
    )
    return max(file.buffer for file in convert_ckpt_deepseek3.plan(options).files)


def test_buffers_do_not_grow_with_the_checkpoint(tmp_path):
    """The largest buffer is for a vocabulary matrix, or for gate and up projections of one expert, not of all."""
    small, large = largest_buffer(tmp_path, 8, 2), largest_buffer(tmp_path, 64, 4)
    assert small == large == 2 * max(192 * 160, 320 * 160, 2 * 48 * 160)


def test_long_matrices_are_written_in_slabs(monkeypatch, quantised, bfloat16, tmp_path):
    """With small limits, buffers are small and the written bytes are the same."""
    monkeypatch.setattr(records, "WRITE_BYTES", 8192)
    monkeypatch.setattr(regions, "SLAB_BYTES", 4096)
    assert convert(quantised, tmp_path / "shards", *LAYOUTS[27].options()) == 0
    assert verify(bfloat16, tmp_path / "shards") == 0
    assert largest_buffer(tmp_path, 8, 2) == max(8192 // 320 * 320, 2 * 2 * 48 * 160)
