"""Parquet files of other tools and releases: the checks and verl's own data set agree about each.

The reference is verl's RLHFDataset over the pinned datasets, with the tiny tokenizer.
"""

import json

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

import verl_patches.prelude_patch  # noqa: F401
from post_training.data import DataError, Problem, to_row
from post_training.data.inspection import check_configured_files
from rehearsal.tiny_model.tokenizer import build_tokenizer
from scripts import check_data

ROWS = [to_row(Problem(f"{n}+1", str(n + 1)), n, "train", "own", "") for n in range(8)]
TEXT = {"dtype": "string", "_type": "Value"}
MESSAGE = {"role": TEXT, "content": TEXT}


def noted(prompt):
    """Return the metadata that datasets writes beside the schema, with the given type of prompt."""
    record = {"style": TEXT, "ground_truth": TEXT}
    features = {"data_source": TEXT, "prompt": prompt, "ability": TEXT, "reward_model": record}
    return {"huggingface": json.dumps({"info": {"features": features}})}


def table(rows=ROWS, metadata=None):
    plain = [{key: row[key] for key in ("data_source", "prompt", "ability", "reward_model")} for row in rows]
    return pyarrow.Table.from_pylist(plain).replace_schema_metadata(metadata)


def with_column(name, values, kind=None):
    position = table().schema.get_field_index(name)
    return table().set_column(position, name, pyarrow.array(values, kind))


MESSAGES = pyarrow.large_list(pyarrow.struct([("role", pyarrow.large_string()), ("content", pyarrow.large_string())]))
FILES = {
    "datasets 2 and 3": table(metadata=noted([MESSAGE])),
    "datasets 4": table(metadata=noted({"feature": MESSAGE, "_type": "List"})),
    "a type of tomorrow": table(metadata=noted({"feature": MESSAGE, "_type": "Conversation"})),
    "pandas": table(metadata={"pandas": "{}"}),
    "large_string": with_column("data_source", [row["data_source"] for row in ROWS], pyarrow.large_string()),
    "large lists, as polars writes them": with_column("prompt", [row["prompt"] for row in ROWS], MESSAGES),
    "categories": with_column("data_source", pyarrow.array(["own"] * 8).dictionary_encode()),
    "one row": table(ROWS[:1]),
}
REJECTED = {
    "no rows": (table().slice(0, 0), "the file has no rows"),
    "fewer rows than a batch": (table(ROWS[:3]), "the data has 3 rows, fewer than data.train_batch_size=4"),
    "no prompt": (table().drop_columns(["prompt"]), "column prompt: it is missing"),
    "a prompt of text": (with_column("prompt", ["1+1"] * 8), "it is not a chat"),
    "a prompt of text in a list": (with_column("prompt", [["1+1"]] * 8), "a message lacks role or content"),
}


def written(folder, content, name="data.parquet"):
    pyarrow.parquet.write_table(content, folder / name)
    return folder / name


def configured(*files, batch=1):
    names = [str(file) for file in files]
    keys = {"prompt_key": "prompt", "reward_fn_key": "data_source", "train_batch_size": batch}
    return {"train_files": names, "val_files": names, **keys}


def trained_on(folder, monkeypatch, *files, batch=1):
    """Return the first batch as verl loads it. Raises the same exceptions as verl."""
    from torch.utils.data import DataLoader
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    options = {"prompt_key": "prompt", "max_prompt_length": 64, "cache_dir": str(folder / "copies")}
    rows = RLHFDataset([str(file) for file in files], build_tokenizer(), OmegaConf.create(options), None)
    loader = DataLoader(rows, batch, drop_last=True, collate_fn=collate_fn)
    assert len(loader) >= 1, "Train dataloader is empty!"  # as RayPPOTrainer does
    return next(iter(loader))


def is_learnt_from(folder, monkeypatch, file, batch=1):
    """Return whether verl loads the file with the question and the truth of its first row in the first prompt."""
    try:
        first = trained_on(folder, monkeypatch, file, batch=batch)
    except Exception:  # verl and datasets raise anything
        return False
    prompt = build_tokenizer().decode(first["input_ids"][0], skip_special_tokens=True).replace(" ", "")
    return "0+1" in prompt and first["reward_model"][0]["ground_truth"] == "1" and first["data_source"][0] == "own"


@pytest.mark.parametrize("name", FILES)
def test_file_of_another_tool_passes_and_is_read(name, tmp_path, monkeypatch, capsys):
    file = written(tmp_path, FILES[name])
    check_configured_files(configured(file))
    assert check_data.main([str(file)]) == 0 and "verl can train on it" in capsys.readouterr().out
    assert is_learnt_from(tmp_path, monkeypatch, file)


@pytest.mark.parametrize("name", REJECTED)
def test_file_that_verl_fails_on_is_rejected(name, tmp_path, monkeypatch, capsys):
    content, says = REJECTED[name]
    file = written(tmp_path, content)
    with pytest.raises(DataError, match=says) as caught:
        check_configured_files(configured(file, batch=4))
    assert "\n" not in str(caught.value)
    assert check_data.main([str(file), "--train_batch_size=4"]) == 1 and says in capsys.readouterr().out
    assert not is_learnt_from(tmp_path, monkeypatch, file, batch=4)


def test_files_together_must_fill_a_batch(tmp_path, monkeypatch):
    files = written(tmp_path, table(ROWS[:3]), "a.parquet"), written(tmp_path, table(ROWS[3:]), "b.parquet")
    check_configured_files(configured(*files, batch=8))
    assert len(trained_on(tmp_path, monkeypatch, *files, batch=8)["data_source"]) == 8
    with pytest.raises(DataError, match="the data has 8 rows, fewer than data.gen_batch_size=9"):
        check_configured_files(configured(*files, batch=8) | {"gen_batch_size": 9})


def test_files_of_unlike_columns_are_rejected(tmp_path, monkeypatch):
    """A different order of fields is accepted; a different width of text is not."""
    rows = [{**row, "reward_model": dict(reversed(row["reward_model"].items()))} for row in ROWS]
    plain, turned = written(tmp_path, table(), "a.parquet"), written(tmp_path, table(rows), "b.parquet")
    wide = written(tmp_path, FILES["large_string"], "c.parquet")
    check_configured_files(configured(plain, turned))
    assert trained_on(tmp_path, monkeypatch, plain, turned)
    with pytest.raises(DataError, match="c.parquet: column data_source is large_string, but string in .*a.parquet"):
        check_configured_files(configured(plain, wide))
    with pytest.raises(ValueError, match="can't be aligned"):
        trained_on(tmp_path, monkeypatch, plain, wide)
