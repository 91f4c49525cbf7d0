#!/usr/bin/env python3
r"""Serve a trained model with vLLM-Ascend, by OpenAI's protocol, until Ctrl-C.

Examples:
    python scripts/serve.py --model RUN
    python scripts/serve.py --model RUN/checkpoints/global_step_50 \
        --port 8000 --tensor-parallel 4 --api-key-file KEY
    python scripts/serve.py --emulate --model MODEL

A model is a HuggingFace folder, an export, or a checkpoint of a training, which is exported first; a run's folder
stands for its newest checkpoint. The server prints its address, http://127.0.0.1:PORT/v1, once it answers.
More in docs/evaluation.md.

Exit codes: 0 ended by Ctrl-C or SIGTERM; 1 the server failed; 2 rejected before anything started.
"""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    # Only the server's processes use a device; a tokenizer is a folder, and no hub is asked for it.
    os.environ |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"}

from post_training.arguments import absolute, finite, whole  # noqa: E402
from post_training.claimed_dies import DiesInUse, claimed_dies  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.masking import masked_output  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag, run_to_the_end  # noqa: E402
from post_training.processes.logs import last_error  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from post_training.user_files import read_object  # noqa: E402
from rehearsal.emulated_dies import remove_emulated_dies  # noqa: E402
from scripts.inference.models import (  # noqa: E402
    STACKS,
    InferenceError,
    check_machine,
    check_stack,
    described,
    engine_environment,
    exported,
    find_model,
)

_SERVER = "vllm.entrypoints.openai.api_server"
_LOOPBACK, _LOOPBACK_6 = "127.0.0.1", "::1"
_KEY_VARIABLE = "VLLM_API_KEY"  # vLLM reads it; an argument would show in the list of processes
_INVALID_HOST = "--host={} is invalid: {}. Set it to an address of this machine"
_PROBE_S = 0.2
_HIGHEST_PORT = 65535


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="[NAME=]DIR", help="clients ask for NAME")
    parser.add_argument("--host", default=_LOOPBACK, metavar="HOST", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=whole(1), default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="a file with the key that clients must send")
    parser.add_argument("--max-model-len", type=whole(2), help="tokens of a prompt and its answer")
    parser.add_argument("--tensor-parallel", type=whole(1), default=1, help="dies (default: 1)")
    share = "share of a die's memory (default: 0.8)"
    parser.add_argument("--memory-share", type=finite(above=0, highest=1), default=0.8, help=share)
    output = "folder of the log (default: outputs/serving/TIME)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    stack = "versions of upstream: docs/stacks.md (default: %(default)s)"
    parser.add_argument("--stack", choices=STACKS, default="2025", metavar="NAME", help=stack)
    parser.add_argument("--emulate", action="store_true", help="run on the emulated NPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the model and return the exit code."""
    options = parse_arguments(arguments)
    try:
        model = find_model(options.model)
        _check_length(model.folder or described(model), options.max_model_len)
        key = _key(options)
        check_stack(options.stack)
        check_machine(options.emulate, options.tensor_parallel, options.stack)
        _check_port(options.host, options.port)
        output = absolute(options.output or ROOT / "outputs" / "serving" / datetime.now().strftime("%Y%m%d-%H%M%S"))
        output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, InferenceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    node, log = f"serve.{os.getpid()}", output / "serve.log"
    try:
        with (
            claimed_dies(0 if options.emulate else options.tensor_parallel),
            SignalFlag() as signals,
            tempfile.TemporaryDirectory(dir=output, prefix=".work.") as work,
        ):
            folder = model.folder or exported(model, Path(work) / "model")
            environment = (
                engine_environment(folder, options.emulate, options.tensor_parallel, node, options.stack) | key
            )
            print(f"Starting {model.name}; log: {log}", flush=True)
            command = _command(options, folder, model.name)
            run_to_the_end(command, environment | key, ROOT, log, signals, check=_Announcement(options, model.name))
    except Interrupted:
        print("The server and its processes have ended.")
        return 0
    except DiesInUse as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (InferenceError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if options.emulate:
            remove_emulated_dies(node)
    print(f"error: the server ended: {last_error(log)} ({log})", file=sys.stderr)
    return 1


def _command(options: argparse.Namespace, folder: Path, name: str) -> list[str]:
    command = [sys.executable, "-m", _SERVER, "--model", str(folder), "--served-model-name", name]
    command += ["--host", options.host, "--port", str(options.port), "--dtype", "bfloat16"]
    command += ["--tensor-parallel-size", str(options.tensor_parallel)]
    command += ["--gpu-memory-utilization", str(options.memory_share)]
    command += ["--enforce-eager"] if options.emulate else []
    return command + (["--max-model-len", str(options.max_model_len)] if options.max_model_len else [])


class _Announcement:
    """Prints once that the server answers; called a few times a second."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        host = {"0.0.0.0": _LOOPBACK, "": _LOOPBACK, "::": _LOOPBACK_6}.get(options.host, options.host)
        host = f"[{host}]" if ":" in host else host
        self._address, self._name, self._said = f"http://{host}:{options.port}", name, False

    def __call__(self) -> None:
        if self._said:
            return
        try:
            with urllib.request.urlopen(f"{self._address}/health", timeout=_PROBE_S) as answer:
                self._said = answer.status == 200
        except (urllib.error.URLError, OSError):
            return
        print(f"{self._name} answers at {self._address}/v1; Ctrl-C ends it.", flush=True)


def _key(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variable with the key that clients need; empty on loopback if no key file is given.

    Raises:
        InferenceError: the file has no key, or other machines could reach the address without a key.
    """
    if options.api_key_file is None:
        if options.host not in (_LOOPBACK, "localhost", _LOOPBACK_6):
            raise InferenceError(
                f"--host={options.host} lets everyone who reaches it use the model. Set --api-key-file"
            )
        return {}
    key = options.api_key_file.read_text().strip()
    if not key or len(key.split()) != 1:
        raise InferenceError(f"--api-key-file={options.api_key_file} is invalid: no key. Write one word into it")
    return {_KEY_VARIABLE: key}


def _check_length(folder: Path, length: int | None) -> None:
    most = read_object(folder / "config.json").get("max_position_embeddings")
    if length and most and length > most:
        raise InferenceError(
            f"--max-model-len={length} is invalid: the model reads {most} tokens. Set it to at most {most}"
        )


def _check_port(host: str, port: int) -> None:
    if port > _HIGHEST_PORT:
        raise InferenceError(f"--port={port} is invalid. Set it to a number from 1 to {_HIGHEST_PORT}")
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
        # vLLM takes the IPv4 address of a name.
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        probe = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InferenceError(_INVALID_HOST.format(host, getattr(error, "strerror", None) or error)) from error
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise InferenceError(_INVALID_HOST.format(host, error.strerror)) from error
            raise InferenceError(f"--port={port} is not available at {host} ({error.strerror}). Set another") from error


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())
