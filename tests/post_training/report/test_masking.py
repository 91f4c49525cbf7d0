"""Secrets do not reach what a run writes; everything else does."""

import pytest

from post_training.report.masking import masked


@pytest.mark.parametrize(
    "name",
    ["webhook", "api_key", "wandb_api_key", "password", "secret", "client_secret", "access_key", "hf_token", "token"],
)
def test_a_key_that_names_a_secret_is_masked(name):
    assert masked({"a": [{name: "x"}]}, {}) == {"a": [{name: "***"}]}


def test_what_is_no_secret_stays():
    config = {"prompt_key": "prompt", "max_tokens": 5, "eos_token": "</s>", "password": "", "trust_remote_code": True}
    assert masked(config, {"HOME_KEY": "short"}) == config


def test_users_of_addresses_and_values_of_the_environment_are_masked_anywhere():
    environment = {"SWANLAB_API_KEY": "0123456789", "PATH": "prompt-prompt"}
    config = {"proxy": "http://me:pw@host:1/x", "note": "with 0123456789 inside", "path": "prompt-prompt"}
    expected = {"proxy": "http://***@host:1/x", "note": "with *** inside", "path": "prompt-prompt"}
    assert masked(config, environment) == expected


def test_a_variable_is_a_secret_from_eight_characters_and_the_longest_goes_first():
    environment = {"A_KEY": "1234567", "B_TOKEN": "abcdefgh", "C_SECRET_ID": "abcdefghij", "D_PATH": "pathpathpath"}
    text = "1234567 abcdefgh abcdefghij pathpathpath"
    assert masked([text, (text,), 5, None], environment) == [
        "1234567 *** *** pathpathpath",
        ["1234567 *** *** pathpathpath"], 5, None,
    ]  # fmt: skip
    assert masked({"password": 5, "secret": "", "Token": "x"}, {}) == {"password": 5, "secret": "", "Token": "***"}
    assert masked("http://user@host and https://a@b/", {}) == "http://***@host and https://***@b/"
