"""Code shared by the scripts in examples/data_preprocess: convert a published data set for verl, from hub or files."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from post_training.data import DataError
from post_training.data.hub_files import split_file
from post_training.hub import HubError, download_commands, snapshot
from post_training.terminal import escape_output
from scripts import json_to_parquet


@dataclass(frozen=True)
class Published:
    """A data set: its names on the hubs, the sentence that ends verl's prompts for it, and verl's folder for it."""

    name: str
    modelscope: str
    instruction: str
    local_dir: str


def preprocess(published: Published, arguments: list[str] | None = None) -> int:
    """Convert a data set and return the exit code, 2 after one sentence that names what is missing."""
    escape_output()
    parser = argparse.ArgumentParser(description=f"Turns {published.name} into verl's parquet files.")
    parser.add_argument("--local_dir", default=published.local_dir, help="where the two files are written")
    parser.add_argument("--local_dataset_path", help="folder with the downloaded data set; nothing is downloaded then")
    parser.add_argument("--hdfs_dir", help="verl's option, not supported")
    options = parser.parse_args(arguments)
    try:
        if options.hdfs_dir:
            raise DataError(f"--hdfs_dir={options.hdfs_dir} is not supported. Copy the files of --local_dir there.")
        source = _source(published, options.local_dataset_path)
        files = [str(split_file(source, split)) for split in ("train", "test")]
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    convert = ["--json_path", files[0], "--test_json_path", files[1], "--data_source", published.name]
    output = str(Path(options.local_dir).expanduser())
    return json_to_parquet.main([*convert, "--output_dir", output, "--instruction", published.instruction])


def _source(published: Published, local: str | None) -> Path:
    if local:
        return Path(local).expanduser()
    try:
        return snapshot(published.name, "dataset", published.modelscope)
    except HubError as error:
        folder = published.name.partition("/")[2]
        commands = download_commands(published.name, "dataset", folder, published.modelscope)
        raise DataError(
            f"The data set {published.name} cannot be downloaded: {error}. Download it on a machine with a network, "
            f"with {commands}, and pass --local_dataset_path {folder}."
        ) from error
