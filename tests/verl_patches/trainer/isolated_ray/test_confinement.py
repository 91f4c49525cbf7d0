"""The addresses on which torch's store listens, read from the kernel's socket table."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
# Prints the addresses on which a store listens that two groups of a process share, after reading a value from it.
PROGRAM = """
import datetime, importlib, socket, sys
from verl_patches.trainer.isolated_ray import confine_worker
rendezvous = importlib.import_module("torch.distributed.rendezvous")
plain = rendezvous.TCPStore
if sys.argv[1] == "confined":
    confine_worker()
host = sys.argv[2]
with socket.socket() as free:
    free.bind((host, 0))
    port = free.getsockname()[1]
url = f"tcp://{host}:{port}?world_size=1&rank=0"
first, _, _ = next(rendezvous.rendezvous(url))
# A second group of the same process shares the server.
second, _, _ = next(rendezvous.rendezvous(url))
first.set("key", "value")
client = plain(host, port, 1, False, datetime.timedelta(seconds=20))
assert client.get("key") == second.get("key") == b"value"
lines = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/net/{table}").readlines()[1:]]
print(*[fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")])
"""


def listening(mode: str, host: str) -> str:
    line = [sys.executable, "-c", PROGRAM, mode, host]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_at_a_loopback_address_listens_there_alone(host):
    assert listening("confined", host) == "0100007F"


def test_torch_itself_would_listen_everywhere():
    """The control: the store without confinement."""
    assert listening("plain", "127.0.0.1") == "0" * 32
