"""Faults are reported, no faulty output is marked complete, and no finished file is lost."""

import errno
import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from post_training.checkpoint import conversion, durable, workers
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.regions import Region, StoredTensor
from tests.post_training.checkpoint.reference import ReferenceShards, ShardLayout, dequantised, load_folder
from tests.post_training.checkpoint.synthetic import Synthetic, small_config
from tests.post_training.checkpoint.tools import cast, convert, export, verify

LAYOUT = ShardLayout(tp=2, pp=2, ep=2, stages=(1, 2), tp_extend_ep=True)
OPTIONS = LAYOUT.options()
MARKERS = ("latest_checkpointed_iteration.txt", "model.safetensors.index.json")
INDEX = "model.safetensors.index.json"
CONFIG = small_config(num_hidden_layers=3)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return Synthetic(CONFIG).write(tmp_path_factory.mktemp("pristine") / "fp8")


@pytest.fixture
def source(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "source")


@pytest.fixture
def output(tmp_path):
    return tmp_path / "output"


@pytest.fixture(scope="module")
def expected(pristine):
    """The archives' tensors by path, from the naive reference."""
    reference = ReferenceShards(dequantised(load_folder(pristine)), Synthetic(CONFIG).shape, LAYOUT)
    ranks = [(tp, pp, ep) for pp in range(2) for ep in range(2) for tp in range(2)]
    return {reference.path(*rank): reference.content(*rank)["model"] for rank in ranks}


def assert_complete(output: Path, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    assert (output / MARKERS[0]).read_text() == "1"
    assert json.loads((output / "manifest.json").read_text())["complete"]
    assert {str(path.relative_to(output)) for path in output.rglob("*.pt")} == expected.keys()
    for path, tensors in expected.items():
        found = torch.load(output / path, weights_only=True)["model"]
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()), path
    assert not list(output.rglob("*.partial"))


def assert_rejected(status: int, output: Path, capsys: pytest.CaptureFixture, *words: str) -> None:
    """Check for exit status 2, a message with these words, and no completion marker."""
    message = capsys.readouterr().err.split("error: ")[-1]
    assert status == 2 and all(word in message for word in words), message
    assert not any((output / marker).exists() for marker in MARKERS)


def assert_untouched(output: Path) -> None:
    assert not output.exists() or not list(output.iterdir())


def flip(path: Path, position: int) -> None:
    """Change one bit; a negative position counts from the end."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x04
    path.write_bytes(content)


def a_file(folder: Path, number: int = 0) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], number: int = 1) -> None:
    """Change the tensors of one file and the index, as a wrong download or a wrong tool would."""
    file = a_file(folder, number)
    before = load_file(file)
    tensors = dict(before)
    change(tensors)
    save_file(tensors, file)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: where for name, where in index["weight_map"].items() if where != file.name}
    index["weight_map"] |= dict.fromkeys(tensors, file.name)
    (folder / INDEX).write_text(json.dumps(index))


def in_a_child(action: Callable[[], int]) -> int:
    """Run in a forked process; return its wait status."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = action()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


# Kills at any point


class Events:
    """Count every write, sync and rename of all processes, and kill the main process at event `fatal`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fatal: int | None = None) -> None:
        self.count = get_context("fork").Value("q", 0)
        self.fatal = fatal
        self.main = os.getpid()
        for owner, name in ((durable, "_write_all"), (os, "fsync"), (Path, "rename")):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, function: Callable) -> Callable:
        def call(*arguments):
            with self.count.get_lock():
                self.count.value += 1
                fatal = self.count.value == self.fatal
            if fatal:
                os.kill(self.main, signal.SIGKILL)
            return function(*arguments)

        return call


@pytest.fixture(scope="module")
def event_count(pristine, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        events = Events(monkeypatch)
        assert convert(pristine, tmp_path_factory.mktemp("counted") / "output", *OPTIONS) == 0
    return events.count.value


@pytest.mark.parametrize("number", range(20))
def test_killed_at_a_random_point_and_run_again(number, event_count, pristine, output, expected, capsys):
    point = random.Random(number).randint(1, event_count)

    def killed() -> int:
        with pytest.MonkeyPatch.context() as monkeypatch:
            Events(monkeypatch, fatal=point)
            return convert(pristine, output, *OPTIONS)

    assert os.WTERMSIG(in_a_child(killed)) == signal.SIGKILL
    if (output / MARKERS[0]).exists():
        assert_complete(output, expected)
    manifest = output / "manifest.json"
    finished = json.loads(manifest.read_text())["files"] if manifest.exists() else {}
    before = {name: (output / name).stat().st_mtime_ns for name in finished}
    capsys.readouterr()
    assert convert(pristine, output, *OPTIONS) == 0
    if finished:
        assert f"{len(finished)} verified from an earlier run" in capsys.readouterr().out
    assert before == {name: (output / name).stat().st_mtime_ns for name in finished}
    assert_complete(output, expected)


def test_a_killed_worker_is_an_error_and_a_rerun_completes(monkeypatch, pristine, output, expected, capsys):
    with monkeypatch.context() as patch:
        main, write = os.getpid(), durable._write_all

        def kill_worker(*arguments):
            if os.getpid() != main:
                os.kill(os.getpid(), signal.SIGKILL)
            write(*arguments)

        patch.setattr(durable, "_write_all", kill_worker)
        assert_rejected(convert(pristine, output, *OPTIONS), output, capsys, "worker process was killed", "again")
    assert convert(pristine, output, *OPTIONS) == 0
    assert_complete(output, expected)


def test_the_marker_is_written_last(monkeypatch, pristine, output, tmp_path):
    """The marker promises verified files, so it is absent while one is written, and follows a complete manifest."""
    seen, write = tmp_path / "seen", conversion.write_durably

    def noted(path, *arguments):
        complete = json.loads((output / "manifest.json").read_text())["complete"]
        with seen.open("a") as file:  # shared by all processes
            file.write(f"{path.suffix} {complete} {(output / MARKERS[0]).exists()}\n")
        return write(path, *arguments)

    monkeypatch.setattr(conversion, "write_durably", noted)
    assert convert(pristine, output, *OPTIONS) == 0
    lines = seen.read_text().splitlines()
    assert set(lines[:-1]) == {".pt False False"} and lines[-1] == ".txt True False"
    seen.unlink()
    next(output.rglob("*.pt")).unlink()
    assert convert(pristine, output, *OPTIONS) == 0
    assert seen.read_text().splitlines() == [".pt False False", ".txt True False"]


def test_workers_die_with_the_main_process(tmp_path):
    """Otherwise a rerun could start while a worker of the killed run is still writing."""
    reading, writing = os.pipe()

    def killed() -> int:
        os.close(reading)

        def task(_, __):
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()

        list(workers.run_tasks(task, range(1), 1, conversion.progress_bar(0, "")))
        return 0

    assert os.WTERMSIG(in_a_child(killed)) == signal.SIGKILL
    os.close(writing)
    assert os.read(reading, 1) == b""  # end of the pipe: all processes have closed its other side
    os.close(reading)


# Damaged sources


@pytest.mark.parametrize("length", [4, 200, -1, -100_000])
def test_truncated_input(length, source, output, capsys):
    content = a_file(source).read_bytes()
    a_file(source).write_bytes(content[:length])
    for tool, options in ((convert, OPTIONS), (cast, [])):
        assert_rejected(tool(source, output, *options), output, capsys, a_file(source).name, "Download it again")
    assert_untouched(output)


def test_input_with_bytes_too_many(source, output, capsys):
    with a_file(source).open("ab") as file:
        file.write(b"x")
    assert_rejected(convert(source, output, *OPTIONS), output, capsys, "longer than its header says")


def test_input_truncated_while_it_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    region = Region.of(StoredTensor(path, 50, torch.float32, (20, 2)))
    with pytest.raises(CheckpointError, match="ends at byte 100"):
        region.read()


def test_flipped_byte_in_input_against_known_checksums(source, output, capsys):
    names = [file.name for file in sorted(source.glob("*.safetensors"))]
    lines = [f"{durable.hash_file(source / name, lambda _: None).sha256}  {name}\n" for name in names]
    checksums = source / "SHA256SUMS"
    checksums.write_text("".join(lines))
    flip(source / names[1], -3)
    status = convert(source, output, *OPTIONS, "--source-checksums", str(checksums))
    assert_rejected(status, output, capsys, names[1], "Download it again")
    assert_untouched(output)
    flip(source / names[1], -3)
    assert convert(source, output, *OPTIONS, "--source-checksums", str(checksums)) == 0


def test_flipped_byte_in_input_between_two_runs(monkeypatch, source, output, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert convert(source, output, *OPTIONS) == 130
    flip(a_file(source), -3)
    assert_rejected(convert(source, output, *OPTIONS), output, capsys, a_file(source).name, "the file has changed")


def test_flipped_byte_in_input_after_the_conversion(source, output, capsys):
    assert convert(source, output, *OPTIONS) == 0
    flip(a_file(source, 1), -3)
    assert verify(source, output) == 1
    assert "different: model." in capsys.readouterr().out
    assert convert(source, output, *OPTIONS) == 2


def test_flipped_byte_in_a_cast_that_is_converted(source, output, tmp_path, capsys):
    assert cast(source, tmp_path / "bf16") == 0
    flip(a_file(tmp_path / "bf16"), -3)
    assert_rejected(convert(tmp_path / "bf16", output, *OPTIONS), output, capsys, "the file has changed")


def test_flipped_byte_in_every_header_is_an_error_or_found(source, output):
    """Whether it hits a name, a shape, a dtype or an offset, no conversion succeeds with other weights."""
    path = a_file(source, 2)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    for position in random.Random(0).sample(range(8 + length), 25):
        flip(path, position)
        if convert(source, output, *OPTIONS) == 0:
            # The flipped byte was in the metadata or in padding, and describes no tensor.
            assert verify(source, output) == 0
        shutil.rmtree(output, ignore_errors=True)
        flip(path, position)


def test_not_a_number_in_fp8(source, output, capsys):
    def damage(tensors):
        name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
        tensors[name].view(torch.uint8)[0, 0] = 0x7F

    edit(source, damage)
    damaged = next(name for name in load_file(a_file(source, 1)) if f"{name}_scale_inv" in load_file(a_file(source, 1)))
    for tool, options in ((convert, OPTIONS), (cast, [])):
        folder = output / tool.__name__
        assert_rejected(tool(source, folder, *options), folder, capsys, f"tensor {damaged}, rows 0 to", "NaN")


@pytest.fixture(scope="module")
def predicting(tmp_path_factory):
    """A checkpoint with a complete layer for multi-token prediction."""
    config = small_config(num_hidden_layers=2, num_nextn_predict_layers=1)
    return Synthetic(config).write(tmp_path_factory.mktemp("predicting") / "fp8")


@pytest.mark.parametrize("part", ["eh_proj.weight", "mlp.experts.3.up_proj.weight", "embed_tokens.weight"])
def test_missing_tensor_of_multi_token_prediction(part, predicting, tmp_path, output, capsys):
    """Cast and comparison of a complete layer report the missing tensor."""
    source, name = shutil.copytree(predicting, tmp_path / "source"), f"model.layers.2.{part}"
    for number, file in enumerate(sorted(source.glob("*.safetensors"))):
        if name in load_file(file):
            edit(source, lambda tensors: [tensors.pop(name), tensors.pop(f"{name}_scale_inv", None)], number)
    assert_rejected(cast(source, output), output, capsys, f"tensor {name} is missing")
    assert_untouched(output)
    for pair in ((source, predicting), (predicting, source), (source, source)):
        assert verify(*pair) == 2
        assert f"tensor {name} is missing" in capsys.readouterr().err


def test_checkpoint_without_the_layer_of_multi_token_prediction(predicting, tmp_path, capsys):
    """Without any of its tensors the layer is not compared, and the output says so."""
    without = shutil.copytree(predicting, tmp_path / "without")
    for number in range(len(list(without.glob("*.safetensors")))):
        edit(
            without, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.2.")], number
        )
    assert cast(without, tmp_path / "cast") == 0
    assert verify(predicting, without) == 0
    assert "not compared" in capsys.readouterr().out


def a_scale(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in tensors if name.endswith("_scale_inv"))


@pytest.mark.parametrize("tool", [cast, convert])
def test_missing_scale(tool, source, output, capsys):
    edit(source, lambda tensors: tensors.pop(a_scale(tensors)))
    status = tool(source, output, *(OPTIONS if tool is convert else []))
    assert_rejected(status, output, capsys, "is FP8, but", "_scale_inv is missing")
    assert_untouched(output)


def test_scale_of_another_shape(source, output, capsys):
    edit(source, lambda tensors: tensors.update({a_scale(tensors): torch.ones(1, 1)}))
    assert_rejected(convert(source, output, *OPTIONS), output, capsys, "_scale_inv", "needs float32")


@pytest.mark.parametrize("tool", [cast, convert])
def test_missing_tensor(tool, source, output, capsys):
    edit(source, lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight"))
    status = tool(source, output, *(OPTIONS if tool is convert else []))
    assert_rejected(status, output, capsys, "model.layers.1.input_layernorm.weight is missing")
    assert_untouched(output)


@pytest.mark.parametrize("name", ["model.layers.1.extra.weight", "model.layers.3.input_layernorm.weight"])
def test_unexpected_tensor(name, source, output, capsys):
    edit(source, lambda tensors: tensors.update({name: torch.ones(2)}))
    for tool, options in ((convert, OPTIONS), (cast, [])):
        assert_rejected(tool(source, output, *options), output, capsys, f"{name} is not part of the model")
    assert_untouched(output)


def test_tensor_of_another_shape(source, output, capsys):
    edit(source, lambda tensors: tensors.update({"model.layers.1.input_layernorm.weight": torch.ones(8)}))
    assert_rejected(convert(source, output, *OPTIONS), output, capsys, "input_layernorm", "has shape (8,)")


@pytest.mark.parametrize("where", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_index_that_points_outside_the_folder(where, source, output, capsys):
    shutil.copy(a_file(source), source.parent / "outside.safetensors")
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = where
    (source / INDEX).write_text(json.dumps(index))
    assert_rejected(convert(source, output, *OPTIONS), output, capsys, "model.norm.weight", "outside the folder")


def test_index_of_the_fp8_checkpoint_copied_over_a_cast(source, output, tmp_path, capsys):
    """The published recipe copies the index this way; it then lists scales that are in no file."""
    assert cast(source, tmp_path / "bf16") == 0
    shutil.copy(source / INDEX, tmp_path / "bf16" / INDEX)
    assert_rejected(convert(tmp_path / "bf16", output, *OPTIONS), output, capsys, "_scale_inv is missing", INDEX)


def test_a_cast_that_has_not_ended_is_no_source(monkeypatch, source, output, tmp_path, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cast(source, tmp_path / "bf16") == 130
    assert_rejected(convert(tmp_path / "bf16", output, *OPTIONS), output, capsys, f"no {INDEX}")
    assert cast(source, tmp_path / "complete") == 0
    shutil.copy(tmp_path / "complete" / INDEX, tmp_path / "bf16" / INDEX)
    assert_rejected(convert(tmp_path / "bf16", output, *OPTIONS), output, capsys, "has not finished")
    assert_untouched(output)


@pytest.mark.parametrize("size", ["-1", "0", "nan", "inf", "1e-10"])
def test_size_of_files_that_is_none(size, pristine, output, tmp_path, capsys):
    assert convert(pristine, output, *OPTIONS) == 0
    status = export(output, pristine, tmp_path / "exported", f"--max-file-gb={size}")
    assert_rejected(status, tmp_path / "exported", capsys, f"--max-file-gb={size} is invalid. Set it to a size above 0")
    assert_untouched(tmp_path / "exported")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "kv_lora_rank"}),
            "no kv_lora_rank",
        ),
        (lambda text: "[" * 100_000, "config.json: not JSON"),
        (lambda text: "[]", "config.json: not a JSON object"),
    ],
)
def test_configuration_that_is_none(damage, words, source, output, capsys):
    (source / "config.json").write_text(damage((source / "config.json").read_text()))
    for tool, options in ((convert, OPTIONS), (cast, [])):
        assert_rejected(tool(source, output, *options), output, capsys, words)
    assert verify(source, source) == 2
    assert_untouched(output)


# Damaged outputs


@pytest.mark.parametrize("place", [700, -200_000, -1])
def test_flipped_byte_in_output(place, pristine, output, expected, capsys):
    assert convert(pristine, output, *OPTIONS) == 0
    shard = output / next(iter(expected))
    flip(shard, place)
    if place != -1:
        assert verify(pristine, output) != 0
    capsys.readouterr()
    assert convert(pristine, output, *OPTIONS) == 0
    said = capsys.readouterr().out
    assert "damaged since it was written" in said and "7 verified" in said
    assert_complete(output, expected)


def test_lost_and_truncated_shards_are_written_again(pristine, output, expected):
    assert convert(pristine, output, *OPTIONS) == 0
    first, second, *_ = expected
    (output / first).unlink()
    os.truncate(output / second, 1000)
    assert verify(pristine, output) == 2
    assert convert(pristine, output, *OPTIONS) == 0
    assert_complete(output, expected)


@pytest.mark.parametrize("replica", ["mp_rank_00_001_000", "mp_rank_01_001_001"])
def test_ranks_that_disagree_are_noticed(replica, pristine, output, tmp_path, capsys):
    """Change a weight that is replicated on the last stage on one rank, and remove the manifest."""
    assert convert(pristine, output, *OPTIONS) == 0
    path = output / "iter_0000001" / replica / "model_optim_rng.pt"
    content = torch.load(path, weights_only=True)
    content["model"]["decoder.final_layernorm.weight"][5] += 1
    torch.save(content, path)
    assert verify(pristine, output) == 1
    assert verify(output, pristine) == 1
    (output / "manifest.json").unlink()
    options = [option.replace("--target-", "--source-") for option in OPTIONS]
    status = export(output, pristine, tmp_path / "exported", *options)
    assert_rejected(status, tmp_path / "exported", capsys, "ranks disagree: model.norm.weight: [5]")


# Full disks, occupied folders, wrong layouts


def test_small_disk_reported_before_writing(monkeypatch, pristine, output, capsys):
    real = os.statvfs(pristine)
    small = os.statvfs_result((real.f_bsize, real.f_frsize, *real[2:4], 2, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    assert_rejected(convert(pristine, output, *OPTIONS), output, capsys, "GiB more, but its disk has 0.00 GiB free")
    assert_untouched(output)


def test_small_memory_reported_before_writing(monkeypatch, pristine, output, capsys):
    monkeypatch.setattr(conversion, "_available_memory", lambda: 1 << 20)
    assert_rejected(convert(pristine, output, *OPTIONS), output, capsys, "fewer --workers")
    assert_untouched(output)


def test_needed_and_free_resources_printed_first(monkeypatch, pristine, output, capsys):
    monkeypatch.setattr(conversion, "_available_memory", lambda: 7 << 28)
    real = os.statvfs(pristine)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, *real[2:4], 5 << 17, *real[5:])))
    monkeypatch.setattr(conversion, "WORKER_BYTES", 1 << 29)
    assert convert(pristine, output, *OPTIONS, "--workers", "1") == 0
    said = capsys.readouterr().out
    assert re.search(r"files to write: 0\.\d\d GiB on disk \(2\.50 GiB free\), up to 0\.5\d GiB of memory in 1 ", said)
    assert "(1.75 GiB available)" in said


def test_disk_that_fills_up(monkeypatch, pristine, output, expected, capsys):
    """After a full disk is freed, only the files that did not fit are written."""
    written, write = get_context("fork").Value("q", 0), durable._write_all

    def limited(descriptor, chunk):
        with written.get_lock():
            written.value += len(chunk)
            if written.value > 2_500_000:
                os.write(descriptor, memoryview(chunk)[: len(chunk) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "_write_all", limited)
        assert_rejected(convert(pristine, output, *OPTIONS), output, capsys, "No space left", "again")
    finished = len(json.loads((output / "manifest.json").read_text())["files"])
    assert 0 < finished < len(expected) and not list(output.rglob("*.partial"))
    assert convert(pristine, output, *OPTIONS) == 0
    assert f"{finished} verified" in capsys.readouterr().out
    assert_complete(output, expected)


def test_file_size_limit_of_the_system(pristine, output, expected):
    """The kernel's own limit makes reserving space for the first file fail."""

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        return convert(pristine, output, *OPTIONS)

    assert os.WEXITSTATUS(in_a_child(limited)) == 2
    assert not list(output.rglob("*.pt")) and not list(output.rglob("*.partial"))
    assert convert(pristine, output, *OPTIONS) == 0
    assert_complete(output, expected)


def test_output_folder_that_is_not_empty(pristine, output, capsys):
    output.mkdir()
    (output / "mine.txt").write_text("keep")
    for tool, options in ((convert, OPTIONS), (cast, [])):
        assert_rejected(tool(pristine, output, *options), output, capsys, "not empty", "mine.txt")
    assert [path.name for path in output.iterdir()] == ["mine.txt"]


def test_output_folder_of_another_conversion(pristine, output, capsys):
    assert convert(pristine, output, *OPTIONS) == 0
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert convert(pristine, output, *ShardLayout(stages=(3,)).options()) == 2
    assert "Choose another folder" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_cast_of_a_changed_folder_rejected(name, source, output, capsys):
    assert cast(source, output) == 0
    before = {path: path.read_bytes() for path in output.iterdir()}
    content = json.loads((source / name).read_text())
    (source / name).write_text(json.dumps(content | {"rope_theta": 123456}))
    assert cast(source, output) == 2
    said = capsys.readouterr().err
    assert ("config.rope_theta=" if name == "config.json" else "tokenizer.json: has SHA-256") in said
    assert {path: path.read_bytes() for path in output.iterdir()} == before


@pytest.mark.parametrize("shards_have_a_manifest", [True, False])
def test_export_of_shards_with_another_tokenizer_rejected(shards_have_a_manifest, source, output, tmp_path, capsys):
    assert convert(source, output, *OPTIONS) == 0
    options = [] if shards_have_a_manifest else [option.replace("--target-", "--source-") for option in OPTIONS]
    if not shards_have_a_manifest:
        (output / "manifest.json").unlink()
    assert export(output, source, tmp_path / "exported", *options) == 0
    (source / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": []}')
    assert export(output, source, tmp_path / "exported", *options) == 2
    assert "copied_files.tokenizer.json=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_theta": 123456}, "rope_theta=123456, but {shards}/manifest.json has 10000.0. Set it to"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 40}},
            "rope_scaling={{'type': 'yarn', 'factor': 40}}, but {shards}",
        ),
        ({"hidden_act": None}, "hidden_act=None, but {shards}/manifest.json has 'silu'"),
    ],
)
def test_model_folder_of_another_model_rejected(change, says, source, output, tmp_path, capsys):
    assert convert(source, output, *OPTIONS) == 0
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    status = export(output, source, tmp_path / "exported")
    said = f"--hf-dir={source} is invalid: its config.json has {says.format(shards=output)}"
    assert_rejected(status, tmp_path / "exported", capsys, said)
    assert_untouched(tmp_path / "exported")
    (source / "config.json").unlink()
    assert export(output, source, tmp_path / "exported") == 0
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["rope_theta"] == config["rope_theta"]


def test_model_folder_in_another_type_is_the_same_model(source, output, tmp_path):
    """Its own quantisation, type and layers for multi-token prediction do not reach the export."""
    assert convert(source, output, *OPTIONS) == 0
    config = json.loads((source / "config.json").read_text())
    changed = {"dtype": "float32", "num_nextn_predict_layers": 1, "transformers_version": "5.0", "_name_or_path": "x"}
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config | changed | {"pad_token_id": None}))
    assert export(output, source, tmp_path / "exported") == 0


def test_two_conversions_into_one_folder(monkeypatch, pristine, output, capsys):
    output.mkdir()
    descriptor = os.open(output, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    monkeypatch.setattr(conversion, "_LOCK_WAIT_S", 0)
    assert_rejected(convert(pristine, output, *OPTIONS), output, capsys, "another conversion")
    os.close(descriptor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target-tensor-parallel-size", "3"], "cannot be divided by 3"),
        (["--target-expert-parallel-size", "3"], "experts over the expert group: 8 cannot be divided by 3"),
        (["--target-pipeline-parallel-size", "2"], "3 layers cannot be divided equally over 2"),
        (["--target-pipeline-parallel-size", "2", "--num-layer-list", "1,1"], "does not add up to 3"),
        (["--target-pipeline-parallel-size", "2", "--num-layer-list", "3"], "needs 2 entries"),
        (["--num-layer-list", "a"], "Set it to a list"),
        (["--num-layers", "61"], "Set it to 3, as in config.json"),
        (["--first-k-dense-replace", "3"], "Set it to 1, as in config.json"),
        (["--num-nextn-predict-layers", "1"], "Set it to 0, as in config.json"),
        (["--num-layers-per-virtual-pipeline-stage", "2"], "in chunks of 2"),
        (["--moe-tp-extend-ep"], "needs moe-grouped-gemm"),
        (["--target-tensor-parallel-size", "0"], "--target-tensor-parallel-size=0 is invalid. Set it to at least 1"),
        (["--target-expert-parallel-size", "-2"], "Set it to at least 1"),
        (["--num-layers-per-virtual-pipeline-stage", "0"], "Set it to at least 1"),
        (["--num-nextn-predict-layers", "-1"], "Set it to at least 0"),
    ],
)
def test_layout_that_does_not_divide(options, words, pristine, output, capsys):
    grouped = [] if "--moe-tp-extend-ep" in options else ["--moe-grouped-gemm"]
    assert_rejected(convert(pristine, output, *grouped, *options), output, capsys, words)
    assert_untouched(output)


def test_heads_that_a_split_would_cut(tmp_path, output, capsys):
    config = small_config(num_attention_heads=6, num_key_value_heads=6, num_hidden_layers=2)
    folder = Synthetic(config, files=1).write(tmp_path / "fp8")
    layout = ShardLayout(tp=4, stages=(2,), tp_extend_ep=True)
    assert convert(folder, output, *layout.options()) == 0
    status = convert(folder, tmp_path / "other", *layout.options(), "--mla-mm-split")
    assert_rejected(status, tmp_path / "other", capsys, "whole heads")


def test_an_embedding_of_its_own_for_multi_token_prediction_rejected(tmp_path, output, capsys):
    """Shards have one embedding, so a checkpoint with two would lose one of them."""
    folder = Synthetic(small_config(num_hidden_layers=2, num_nextn_predict_layers=1), files=1).write(tmp_path / "fp8")
    edit(folder, lambda tensors: tensors["model.layers.2.embed_tokens.weight"][7].add_(1), number=0)
    layout = ShardLayout(stages=(2,), mtp=True)
    assert_rejected(convert(folder, output, *layout.options()), output, capsys, "embed_tokens.weight: [7, 0]")
