"""scripts/serve.py: its rejections, and answers from an emulated die to OpenAI's own client."""

import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from io import BytesIO
from pathlib import Path

import pytest

from post_training import claimed_dies
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from scripts import evaluate, serve
from tests.scripts.test_evaluate import greedy_of_transformers

ROOT = Path(__file__).parents[2]
PROBLEMS = ROOT / "data" / "arithmetic" / "test.jsonl"
KEY = ("--api-key-file", "{key}")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """Make a tiny Qwen2 with random weights."""
    request = CheckpointRequest(PROBLEMS, 0, "bfloat16", model_type="qwen2", warm_start=None)
    return make_checkpoint(request, tmp_path_factory.mktemp("qwen") / "model", lambda step, loss: None).path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "absent"], "--model=absent is invalid: not a folder"),
        (["--host", "0.0.0.0"], "--host=0.0.0.0 lets everyone who reaches it use the model. Set --api-key-file"),
        (["--api-key-file", "{empty}"], "is invalid: no key. Write one word into it"),
        (["--port", "{taken}"], "is not available at 127.0.0.1 (Address already in use). Set another"),
        (["--port", "{taken}", "--host", "localhost"], "is not available at localhost (Address already in use)"),
        (["--host", "node-" + 64 * "0", *KEY], "0 is invalid: encoding with 'idna' codec failed"),
        (["--host", "192.0.2.1", *KEY], "--host=192.0.2.1 is invalid: Cannot assign requested address. Set it to an"),
        (["--port", "70000"], "--port=70000 is invalid. Set it to a number from 1 to 65535"),
        (["--max-model-len", "100000000"], "--max-model-len=100000000 is invalid: the model reads"),
    ],
)
def test_unusable_option_is_rejected_in_one_sentence(qwen, tmp_path, capsys, arguments, says):
    (tmp_path / "key").write_text(" \n")
    (tmp_path / "a key").write_text("secret\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        values = {"empty": tmp_path / "key", "key": tmp_path / "a key", "taken": taken.getsockname()[1]}
        given = ["--model", str(qwen), "--emulate", "--output", str(tmp_path / "out")]
        assert serve.main([*given, *(each.format(**values) for each in arguments)]) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_host_without_an_address_is_named(monkeypatch):
    def unknown(host, port, type):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(serve.InferenceError, match="^--host=node7 is invalid: Name or service not known. Set it to an"):
        serve._check_port("node7", 8000)


def test_port_is_probed_with_the_family_of_the_host(monkeypatch):
    """A name with addresses of both families is served by IPv4, as vLLM does."""
    probed = []

    class Probe(socket.socket):
        def bind(self, address):
            probed.append((self.family, address))

    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 8000))
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 8000, 0, 0))
    found = {"::1": [six], "localhost": [six, four]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, type: found[host])
    monkeypatch.setattr(socket, "socket", Probe)
    serve._check_port("::1", 8000)
    serve._check_port("localhost", 8000)
    assert probed == [(socket.AF_INET6, six[4]), (socket.AF_INET, four[4])]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:8000/v1"),
        ("::", "http://[::1]:8000/v1"),
        ("0.0.0.0", "http://127.0.0.1:8000/v1"),
        ("localhost", "http://localhost:8000/v1"),
    ],
)
def test_address_of_the_server_is_a_url(monkeypatch, capsys, host, url):
    asked = []

    class Healthy(BytesIO):
        status = 200

    monkeypatch.setattr(urllib.request, "urlopen", lambda address, timeout: asked.append(address) or Healthy())
    options = serve.parse_arguments(["--model", "m", "--host", host])
    serve._Announcement(options, "tiny")()
    assert asked == [url.removesuffix("/v1") + "/health"] and f"tiny answers at {url}; " in capsys.readouterr().out


def test_server_that_ends_is_named_with_its_exception(qwen, tmp_path, monkeypatch, capsys):
    """torch_npu prints a line about an unknown error after it. The engine gets the model's absolute path."""
    started = []

    def failing(command, environment, folder, log, signals, check):
        started.append(command)
        log.write_text(
            "ValueError: no free memory\n[ERROR] 2026-11-30-04:07:44 ERR99999 UNKNOWN applicaiton exception\n"
        )
        return 1

    monkeypatch.setattr(serve, "run_to_the_end", failing)
    monkeypatch.setattr(serve, "_check_port", lambda host, port: None)
    monkeypatch.chdir(qwen.parent)
    assert serve.main(["--model", qwen.name, "--emulate", "--output", str(tmp_path / "out")]) == 1
    assert "error: the server ended: ValueError: no free memory (" in capsys.readouterr().err
    assert started[0][started[0].index("--model") + 1] == str(qwen)


def test_without_emulation_the_emulated_npu_is_not_taken(qwen, capsys):
    assert serve.main(["--model", str(qwen)]) == 2
    assert "has only the emulated NPU. Add --emulate" in capsys.readouterr().err


@pytest.mark.parametrize("program", [serve, evaluate])
def test_dies_of_another_job_are_not_taken(qwen, tmp_path, monkeypatch, capsys, program):
    devices = [tmp_path / f"davinci{number}" for number in range(2)]
    monkeypatch.setattr(claimed_dies, "devices_of_dies", lambda root: devices)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(program, "check_machine", lambda *_: None)
    monkeypatch.setattr(program, "run_to_the_end", lambda *_, **__: pytest.fail("nothing is started"))
    line = ["--model", str(qwen), "--output", str(tmp_path / "out"), "--tensor-parallel", "2"]
    line += [] if program is serve else ["--data", str(PROBLEMS)]
    monkeypatch.setattr(serve, "_check_port", lambda host, port: None)
    with claimed_dies.claimed_dies(1, {"ASCEND_RT_VISIBLE_DEVICES": "1"}):
        assert program.main(line) == 2
    said = capsys.readouterr().err
    assert "error: ASCEND_RT_VISIBLE_DEVICES (not set: dies 0 to 1) is invalid" in said and "has die 1" in said


@pytest.mark.slow
def test_trained_model_answers_openais_client(qwen, tmp_path):
    check_answers(qwen, tmp_path)


def check_answers(qwen, tmp_path, *options):
    """Greedy answers equal transformers', except for near ties in bfloat16; without the key there are none; Ctrl-C
    leaves nothing behind."""
    from openai import AuthenticationError, OpenAI
    from transformers import AutoTokenizer

    chats = [[{"role": "user", "content": f"{first}-{second}"}] for first in range(3, 7) for second in range(1, 4)]
    (tmp_path / "key").write_text("secret-of-the-test\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "scripts/serve.py", "--emulate", "--model", f"tiny={qwen}", "--port", str(port)]
    command += ["--api-key-file", str(tmp_path / "key"), "--output", str(tmp_path / "out"), "--max-model-len", "64"]
    command += options
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    watchdog = threading.Timer(600, server.kill)
    watchdog.start()
    try:
        said = [server.stdout.readline(), server.stdout.readline()]
        log = (tmp_path / "out" / "serve.log").read_text()
        assert said[1] == f"tiny answers at http://127.0.0.1:{port}/v1; Ctrl-C ends it.\n", log[-2000:]
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret-of-the-test")
        assert [model.id for model in client.models.list()] == ["tiny"]
        asked = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        answers = [client.chat.completions.create(messages=chat, **asked) for chat in chats]
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="another").models.list()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=120) == 0
    finally:
        watchdog.cancel()
        server.kill()
        server.wait()
    assert "secret-of-the-test" not in log and not list((tmp_path / "out").glob(".work*"))
    left = [path for path in Path("/dev/shm").iterdir() if re.search(rf"serve\.{server.pid}\b", path.name)]
    assert not left
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    expected = [tokenizer.decode(each, skip_special_tokens=True) for each in greedy_of_transformers(qwen, prompts, 4)]
    equal = [each.choices[0].message.content == text for each, text in zip(answers, expected, strict=True)]
    assert sum(equal) >= 0.7 * len(equal) and len(set(expected)) > 3, (answers, expected)
    assert [answer.usage.prompt_tokens for answer in answers] == [len(prompt) for prompt in prompts]
