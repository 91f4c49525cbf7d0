"""Prints as JSON what a tracker's own library reads from a run's folder: `readers.py TRACKER FOLDER`.

mlflow: [run, status, parameters, {metric: [[step, value], ...]}]. wandb: ["run", id] and ["history", {name: value}] in
the order of its files. swanlab: ["start", id], ["finish", state] and ["scalar", name, step, value].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def mlflow(folder: Path) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    history = {
        key: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    return [run.info.run_id, run.info.status, run.data.params, history]


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log.

    After 7 bytes, the log consists of blocks of 32 KiB; crc (4 bytes), length (2) and kind (1) precede each part.
    """
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


def wandb(folder: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[Any] = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in _records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                found.append(["run", record.run.run_id])
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append(
                    ["history", {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}]
                )
    return found


def swanlab(folder: Path) -> list[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: list[Any] = []
    files = sorted(folder.glob("swanlog/run-*/*.swanlab"))
    for file in (each for each in files if each.stat().st_size):  # a killed start may not have written anything yet
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("start"):
                found.append(["start", record.start.id])
            if record.HasField("finish"):
                found.append(["finish", record.finish.state])
            if record.HasField("scalar"):
                found.append(["scalar", record.scalar.key, record.scalar.step, record.scalar.value.number])
    return found


if __name__ == "__main__":
    tracker, folder = sys.argv[1:]
    print(json.dumps({"mlflow": mlflow, "wandb": wandb, "swanlab": swanlab}[tracker](Path(folder))))
