"""Secrets are masked in everything that a run writes, and all other text is kept."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from post_training.masking import masked, masked_text
from tests.post_training.masking.planted import NAMES, SHAPES, VALUE, texts
from verl_patches.trainer.main_ppo import CONFIG_FOLDER, compose

ROOT = Path(__file__).resolve().parents[3]
JOBS = sorted(file.stem for file in CONFIG_FOLDER.glob("*.yaml") if "defaults:" in file.read_text())
NO_SECRETS = {
    "prompt_key": "prompt", "reward_fn_key": "data_source", "max_tokens": 5, "max_num_batched_tokens": "8192",
    "eos_token": "</s>", "pad_token_id": 151643, "pad_token": "<pad>", "bos_token": {"content": "<s>"}, "password": "",
    "tokenizer": "/models/qwen", "tokens": ["a", "b"], "compat": "old", "passes": "three", "pass_config": "x",
    "trust_remote_code": True, "author": "me", "keyboard": "us", "secretary": "she", "patience": "5", "path": "/a/b",
    "worker_process_setup_hook": "a.b.prepare_worker", "token_level_loss": "mean", "authentic": "x", "key": "value",
    "password_file": "/etc/key", "api_key_env": "OPENAI_API_KEY",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_value_below_secret_name_masked(name):
    assert masked({"a": [{name: VALUE}]}, {}) == {"a": [{name: "***"}]}
    assert masked({name: [VALUE, {"b": VALUE}]}, {}) == {name: ["***", {"b": "***"}]}
    # A value known by its name is also masked elsewhere in the same configuration.
    assert masked({name: VALUE, "project": f"x-{VALUE}"}, {}) == {name: "***", "project": "x-***"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "below",
    [
        lambda value: value,
        lambda value: [value, "x"],
        lambda value: {"user": value},
        lambda value: {"a": {"b": {"c": value}}},
        lambda value: [{"a": [value]}, None],
    ],
    ids=["value", "list", "group", "deep", "mixed"],
)
def test_value_anywhere_below_secret_name_masked_elsewhere(name, below):
    """Values at any depth are also masked in log lines that quote them."""
    config = {"a": {name: below(VALUE)}, "note": f"logged in with {VALUE}", VALUE: [f"x{VALUE}"]}
    assert VALUE not in json.dumps(masked(config, {}))


@pytest.mark.parametrize(("text", "secret"), texts())
def test_text_with_secret_masked(text, secret):
    assert secret in text
    shown = masked_text(text, {})
    assert secret not in shown and "***" in shown
    assert secret not in json.dumps(masked({"note": text}, {}))


@pytest.mark.parametrize(
    "text, shown",
    [
        ("export HF_TOKEN=abcdef data.seed=1", "export HF_TOKEN=*** data.seed=1"),
        ("'+a.password=correct horse' data.seed=1", "'+a.password=***' data.seed=1"),
        ("'~a.password=correct horse' data.seed=1", "'~a.password=***' data.seed=1"),
        ("HF_TOKEN=/etc", "HF_TOKEN=***"),  # an existing path, under a name that does not denote a path
        ("'+a.password=correct horse", "'+a.password=***"),  # truncated before the closing quote
        ('{"password": 12345, "token": 12345, "n": 2}', '{"password": ***, "token": 12345, "n": 2}'),
        ("api_key=[abc,def], seed=1", "api_key=***, seed=1"),
        ("api_key=[abc,def", "api_key=***"),
        ("api_key={a: b} seed=1", "api_key=*** seed=1"),
        ("(password=abcdef)", "(password=***)"),
        ("password=abcdef, and more.", "password=***, and more."),
        ("--api-key abcdef --seed 1", "--api-key *** --seed 1"),
        ("pass: three of four; token: next", "pass: three of four; token: next"),
        ("api_key: abcdef", "api_key: ***"),
        ("token=None password=null secret=auto api_key=${oc.env:KEY}", None),
        ("KEY=1 MY_KEY=/etc sort_key=length PROMPT_KEY=question max_tokens=8192 eos_token=</s>", None),
        ("a == b, a::token, https://host:8080/x", None),
        (f"x={'-----BEGIN PRIVATE KEY-----'}abc", "x=***"),  # without the END line
    ],
)
def test_masked_text_keeps_all_but_the_secret(text, shown):
    assert masked_text(text, {}) == (text if shown is None else shown)


@pytest.mark.parametrize("name", [*NAMES, "SSH_KEY", "MY_KEY", "aws_access_key_id"])
def test_variable_value_masked_anywhere(name):
    value = 'Tr0ub4dor"&3 ä/'
    assert masked({"note": f"with {value} inside"}, {name: value}) == {"note": "with *** inside"}
    assert masked_text(json.dumps({"note": value}), {name: value}) == '{"note": "***"}'
    assert masked_text("https://host/Tr0ub4dor%22%263%20%C3%A4%2F/x", {name: value}) == "https://host/***/x"


def test_short_variable_masked_as_whole_word():
    environment = {
        "DB_PASS": "hunt7",
        "A_KEY": "1234567",
        "B_KEY": "EMPTY",
        "C_TOKEN": "abcd",
        "PWD": "/nowhere/at-all",
    }
    assert masked_text("hunt7, hunt77 (hunt7) xhunt7", environment) == "***, hunt77 (***) xhunt7"
    assert masked_text("1234567 EMPTY abcd /nowhere/at-all", environment) == "1234567 EMPTY abcd /nowhere/at-all"


def test_variable_with_existing_path_kept(tmp_path):
    environment = {"RAY_TLS_SERVER_KEY": str(tmp_path), "B_TOKEN": "abcdefgh", "C_SECRET_ID": "abcdefghij"}
    assert masked_text(f"{tmp_path} abcdefgh abcdefghij", environment) == f"{tmp_path} *** ***"


def test_lines_of_variable_masked_one_by_one():
    key = "first-line-of-a-key-0001\nsecond-line-of-a-key-0002"
    assert masked_text("x second-line-of-a-key-0002 y", {"DEPLOY_KEY": key}) == "x *** y"


def test_number_masked_below_names_of_secrets_only():
    config = {"password": 12345678, "token": 5, "max_token": 7, "api_key": True, "secret": None}
    assert masked(config, {}) == config | {"password": "***"}
    assert masked_text("password=12345678 token=5", {}) == "password=*** token=5"


@pytest.mark.parametrize("name", ["MY_KEY", "SSH_HOST_KEY", "DB_KEYS", "WECHAT_BOT_KEY_B64"])
@pytest.mark.parametrize(
    "form",
    [
        "{name}={value} python train.py",
        "export {name}='{value}'",
        "docker run -e {name}={value} a",
        "{{'{name}': '{value}'}}",
    ],
)
def test_assigned_variable_that_ends_in_key_masked(name, form):
    """Only upper-case variables are masked; a configuration key with this ending may name a column."""
    assert masked_text(form.format(name=name, value=VALUE), {}) == form.format(name=name, value="***")
    for column in ("my_key", "SORT_KEY", "PROMPT_KEY"):
        text = f"{column}=data_source"
        assert masked_text(text, {}) == text


@pytest.mark.parametrize("form", ["B64", "BASE64", "b64", "base64", "VALUE", "TEXT"])
@pytest.mark.parametrize("name", ["WANDB_API_KEY", "DB_PASSWORD", "hf_token", "RSA_PRIVATE_KEY"])
def test_form_behind_secret_name_is_masked_too(name, form):
    assert masked({f"{name}_{form}": VALUE}, {}) == {f"{name}_{form}": "***"}
    assert masked_text(f"export {name}_{form}={VALUE}", {}) == f"export {name}_{form}=***"
    assert masked_text(f"it printed {VALUE}", {f"{name}_{form}": VALUE}) == "it printed ***"


def test_ordinary_keys_kept():
    assert masked(NO_SECRETS, {}) == NO_SECRETS
    for text in (yaml.safe_dump(NO_SECRETS), json.dumps(NO_SECRETS), str(NO_SECRETS)):
        assert masked_text(text, {}) == text
    command = " ".join(f"{key}={value}" for key, value in NO_SECRETS.items())
    assert masked_text(command, {}) == command


def test_ordinary_log_lines_kept():
    lines = (
        "step:1 - actor/pg_loss:0.1 - response_length/mean:512.0 - perf/max_memory_allocated_gb:1.5",
        "the first pass: 3 s; token: 5 of 8; secret: it is none; tokens per second: 12",
        "(TaskRunner pid=12) {'eos_token': '<|im_end|>', 'pad_token_id': 151643, 'max_prompt_length': 512}",
        "error: data.max_prompt_length=0 is invalid: a prompt has tokens. Set it to 1 or more.",
        'File "/x/tokenizer.py", line 3, in f: token = max(a, b) # https://github.com/volcengine/verl/issues/12',
        "patch verl.utils.tracking:Tracking.log sk-learn hf_config_of_the_model ghp_short AKIA eyJ.a.b",
    )
    for line in lines:
        assert masked_text(line, {}) == line


@pytest.mark.parametrize("job", JOBS)
def test_shipped_configuration_kept(job, monkeypatch):
    """Control: masking must not change a shipped job, as it would then change users' jobs too."""
    overrides = [
        "actor_rollout_ref.model.path=/models/a",
        "data.train_files=[/d/a.parquet]",
        "data.val_files=[/d/b.parquet]",
    ]
    resolved = OmegaConf.to_container(compose(job, overrides), resolve=True)
    assert masked(resolved, {}) == resolved
    as_text = yaml.safe_dump(resolved)
    assert masked_text(as_text, {}) == as_text


def test_published_model_files_kept():
    for file in sorted((ROOT / "tests").rglob("*config*.json")):
        content = json.loads(file.read_text())
        assert masked(content, {}) == content, file


@pytest.mark.parametrize(
    "unit", ["a=", "--a ", "://", "eyJ", "bearer ", "https://a/", "&token", "api-key:", '\\"', "password='", "'", "[",
             "-----BEGIN PRIVATE KEY-----", *SHAPES[:2]],
)  # fmt: skip
def test_degenerate_text_masked_to_its_end(unit):
    """A rule that is quadratic in the length of the text would not finish half a megabyte."""
    shown = masked_text(unit * (500_000 // len(unit)) + f"\npassword={VALUE}", {})
    assert VALUE not in shown and "***" in shown


@pytest.mark.parametrize(
    "value, text, shown",
    [
        ("1234567", "port 1234567", None),
        ("12345678", "port 12345678, x12345678", "port ***, x***"),
        ("abcde", "abcde xabcde", "*** xabcde"),
        ("abcd", "abcd", None),
        ("none", "none", None),
        ("first-secret\nsecond-secret-12", "a second-secret-12", "a ***"),
        ("a/b c+dé-0", "a%2Fb%20c%2Bd%C3%A9-0 a/b c+d\\u00e9-0", "*** ***"),
    ],
)
def test_value_of_a_secret_variable_is_masked_wherever_it_stands(value, text, shown):
    assert masked_text(text, {"A_KEY": value}) == (text if shown is None else shown)


def test_longer_secret_is_masked_before_one_that_it_begins_with():
    assert masked_text("abcdefgh-1234", {"A_KEY": "abcdefgh", "B_KEY": "abcdefgh-1234"}) == "***"
