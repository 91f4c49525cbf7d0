"""Files in Geometry3K's form are read, converted, checked and counted as by transformers' processor and verl."""

import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf
from PIL import Image

import verl_patches.prelude_patch  # noqa: F401
from post_training.data import DataError, read_problems
from post_training.data.images import ImageError, ImageTokens, image_size, prompt_lengths
from post_training.data.inspection import Expectations, check_configured_files, inspect_file
from post_training.data.parquet import IMAGE_SCHEMA, write_files
from post_training.data.rows import to_image_row
from post_training.evaluation.problems import read_questions
from rehearsal.image_task import write_image_task
from scripts import check_data, json_to_parquet
from tests.post_training.data.small_processor import small_processor

IMAGES = Expectations(image_key="images")
SIZES = [(56, 56), (28, 28), (700, 500), (1000, 37), (333, 333), (1500, 900), (29, 200)]


def png(size=(700, 500), mode="RGB"):
    content = io.BytesIO()
    Image.new(mode, size).save(content, format="PNG")
    return content.getvalue()


def row(index=0, question="<image>Find x.", images=None):
    images = (png(),) if images is None else images
    return to_image_row(question, "5", images, index, "train", "hiyouga/geometry3k", "Box it.")


def written(folder, *rows, name="data.parquet"):
    write_files({folder / name: list(rows)}, IMAGE_SCHEMA)
    return folder / name


@pytest.fixture(scope="module")
def processor():
    return small_processor()


@pytest.fixture(scope="module")
def model(tmp_path_factory, processor):
    folder = tmp_path_factory.mktemp("model")
    processor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("limits", [{}, {"max_pixels": 100352}, {"min_pixels": 200704}])
def test_image_tokens_equal_the_processors(size, limits):
    image_processor = small_processor(**limits).image_processor
    grid = image_processor([Image.new("RGB", size)])["image_grid_thw"]
    assert ImageTokens.of(image_processor).count(size) == grid.prod() // 4


@pytest.mark.parametrize("size", [(27, 300), (28, 28 * 201)])
def test_shape_that_the_processor_rejects_raises(size, processor):
    with pytest.raises(ValueError):
        processor.image_processor([Image.new("RGB", size)])
    with pytest.raises(ImageError, match="pixels, which the processor rejects"):
        ImageTokens().count(size)


def test_prompt_lengths_equal_the_processors(processor):
    sizes = [[(56, 56)], [(700, 500), (333, 333)]]
    chats = [[{"role": "user", "content": text}] for text in ("<image>Find x.", "Two: <image> and <image>, <video>?")]
    counted = prompt_lengths(processor, chats, sizes)
    contents = [
        [{"type": "image"}, {"type": "text", "text": "Find x."}],
        [{"type": "text", "text": "Two: "}, {"type": "image"}, {"type": "text", "text": " and "}, {"type": "image"},
         {"type": "text", "text": ", "}, {"type": "video"}, {"type": "text", "text": "?"}],
    ]  # fmt: skip
    for content, images, length in zip(contents, sizes, counted, strict=True):
        messages = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        made = processor(text=[text], images=[Image.new("RGB", size) for size in images])
        assert len(made["input_ids"][0]) == length


def test_sound_files_pass(tmp_path):
    write_image_task(tmp_path, 1, 16)
    for name in ("train", "test"):
        assert inspect_file(tmp_path / f"{name}.parquet", IMAGES).findings == []


CUT = png()[:200]
DEFECTS = {
    "no list": (None, "<image>x", "it has no image"),
    "no image": ((), "x", "it has no image"),
    "one place too few": ((png(), png()), "<image>x", "has <image> 1 times, but each image of the row needs one"),
    "one place too many": ((png(),), "<image><image>x", "has <image> 2 times"),
    "empty": ((b"",), "<image>x", "an image has a path but no bytes"),
    "no picture": ((b"not one",), "<image>x", "an image is in a format that Pillow cannot read"),
    "cut": ((CUT,), "<image>x", "an image cannot be decoded"),
    "narrow": ((png((20, 400)),), "<image>x", "an image has 20x400 pixels, which the processor rejects"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_row_with_a_defect_is_named(name, tmp_path):
    images, question, says = DEFECTS[name]
    broken = {**row(1, question, images or ()), **({} if images is not None else {"images": None})}
    found = inspect_file(written(tmp_path, row(0), broken), IMAGES).errors
    assert len(found) == 1 and (found[0].column, found[0].rows) == ("images", [1])
    assert says in found[0].sentence() and "\n" not in found[0].sentence()


def test_prompt_whose_image_column_is_absent_is_named(tmp_path):
    file = written(tmp_path, row(0))
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).drop_columns(["images"]), file)
    found = inspect_file(file, IMAGES).errors
    assert [each.column for each in found] == ["images"] and "has no such column" in found[0].problem


@pytest.mark.parametrize(("size", "says"), [((40, 40), "enlarges"), ((4000, 3500), "shrinks")])
def test_resized_image_is_a_remark(tmp_path, size, says):
    inspection = inspect_file(written(tmp_path, row(0), row(1, images=(png(size, "L"),))), IMAGES)
    assert inspection.errors == [] and says in inspection.findings[0].problem


def test_equal_words_about_other_images_are_no_repetition(tmp_path):
    file = written(tmp_path, row(0), row(1, images=(png((56, 56)),)), row(2))
    found = inspect_file(file, IMAGES).findings
    assert [(each.rows, each.error) for each in found] == [([2], False)]


def test_a_model_of_text_gets_no_images(tmp_path):
    file = str(written(tmp_path, row(0)))
    data = {"train_files": file, "val_files": file, "prompt_key": "prompt", "reward_fn_key": "data_source"}
    data |= {"train_batch_size": 1, "image_key": "images"}
    check_configured_files(data, reads_images=True)
    with pytest.raises(DataError, match="or train a model that reads images, such as Qwen2.5-VL"):
        check_configured_files(data)


def test_check_data_counts_image_tokens(tmp_path, model, processor, capsys):
    file = written(tmp_path, row(0), row(1, images=(png((56, 56)),)))
    text = len(processor.tokenizer("<|im_start|>user\n<|vision_start|><|vision_end|>Find x. Box it.<|im_end|>\n"
                                   "<|im_start|>assistant\n")["input_ids"])  # fmt: skip
    assert check_data.main([str(file), "--tokenizer", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == {
        "shortest": text + 4, "mean": text + 227.0, "longest": text + 450, "overlong": 0,
    }  # fmt: skip
    arguments = [str(file), "--tokenizer", str(model), "--max_prompt_length=256"]
    assert check_data.main(arguments) == 1
    assert f"the longest prompt has {text + 450}; raise data.max_prompt_length" in capsys.readouterr().out
    assert check_data.main([*arguments, "--filter_overlong_prompts"]) == 0
    assert "verl drops them and trains on 1 rows" in capsys.readouterr().out


def test_verls_filter_counts_image_tokens(tmp_path, monkeypatch, processor):
    """Without the patch, verl keeps a prompt on which it then fails."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = written(tmp_path, row(0), row(1, images=(png((56, 56)),)))
    for max_length, kept in ((1024, [0, 1]), (256, [1]), (20, [])):
        options = {"prompt_key": "prompt", "max_prompt_length": max_length, "cache_dir": str(tmp_path / "copies")}
        data = RLHFDataset([str(file)], processor.tokenizer, OmegaConf.create(options), processor)
        assert [each["index"] for each in data.dataframe["extra_info"]] == kept


def geometry(folder, records):
    """Write a file with the columns of hiyouga/geometry3k."""
    kind = pyarrow.list_(pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    schema = pyarrow.schema([("images", kind), ("problem", pyarrow.string()), ("answer", pyarrow.string())])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records, schema=schema), folder / "geometry.parquet")
    return folder / "geometry.parquet"


def record(images, problem="<image>Find x.", answer="2 \\sqrt { 221 }"):
    return {"images": [{"bytes": image, "path": None} for image in images], "problem": problem, "answer": answer}


def test_geometry3k_is_converted(tmp_path, capsys):
    records = [record([png((60 + n, 60))]) for n in range(10)] + [record([png((60, 60))])]
    file = geometry(tmp_path, records)
    assert json_to_parquet.main(["--json_path", str(file), "--output_dir", str(tmp_path)]) == 0
    assert "dropped 1 whose question occurs before" in capsys.readouterr().out
    rows = [
        each
        for name in ("train", "test")
        for each in pyarrow.parquet.read_table(tmp_path / f"{name}.parquet").to_pylist()
    ]
    assert {each["images"][0]["bytes"] for each in rows} == {each["images"][0]["bytes"] for each in records}
    assert {each["data_source"] for each in rows} == {"hiyouga/geometry3k"}
    assert rows[0]["prompt"][0]["content"].startswith("<image>Find x. Think first, between <think> and </think>.")
    assert rows[0]["reward_model"]["ground_truth"] == rows[0]["extra_info"]["answer"] == "2 \\sqrt { 221 }"
    assert inspect_file(tmp_path / "train.parquet", IMAGES).errors == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (record([png()], "Find x."), "record 2: the problem has <image> 0 times but 1 images"),
        (record([CUT]), "record 2: image 1 cannot be decoded"),
        (record([], "Find y."), "records have images, but verl reads images in all rows of a file or in none"),
    ],
)
def test_unusable_geometry3k_record_rejected(tmp_path, capsys, bad, says):
    others = [record([png((99 + n, 99))]) for n in range(3)]
    file = geometry(tmp_path, [record([png()]), bad, *others])
    options = ["--json_path", str(file), "--output_dir", str(tmp_path), "--test_size", "0.4"]
    assert json_to_parquet.main(options) == 2
    assert says in capsys.readouterr().err


def test_evaluation_of_images_rejected(tmp_path):
    with pytest.raises(DataError, match="evaluate.py supports text only"):
        read_questions(geometry(tmp_path, [record([png()])]))
    assert read_problems(geometry(tmp_path, [record([png()])])).problems[0].source == "hiyouga/geometry3k"


@pytest.mark.parametrize("image", [None, {"path": "a.png"}, {"bytes": "text"}, {"bytes": None, "path": "a.png"}])
def test_record_without_bytes_is_no_image(image):
    with pytest.raises(ImageError):
        image_size(image)
