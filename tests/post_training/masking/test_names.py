"""Tables of names that have secrets or not, each checked for all four questions about a name."""

import pytest

from post_training.masking.names import always_secret, names_secret, names_secret_in_prose, variable_holds_secret

# Letters of what is true of a name: s, has a secret; a, whatever its value; p, also in prose; v, as a variable.
ALL, BUT_NUMBERS, NOT_IN_PROSE, VARIABLE, NONE = "sapv", "spv", "sav", "v", ""
NAMES = {
    ALL: "api_key wandbApiKey access-token-password DB_PASSWD client_secret PGPASSWORD SIGNING_KEYS +a.ssh_key"
    " url_password webhook_url db_password_plain password_text session_cookie",
    BUT_NUMBERS: "hf_token access_tokens refreshToken api_token_value bearer_tokens GITHUB_TOKEN login_tokens",
    NOT_IN_PROSE: "pass secret auth cookies credentials +trainer.secret",
    "sv": "token a.token",
    VARIABLE: "MY_KEY fernet_key SIGN_OFF_KEYS encrypt-key MAP_KEY_ID",
    NONE: "key keys prompt_key sort_key a.prompt_key tokens max_tokens eos_token pad_token_id unk_token new_tokens id"
    " url text_token monkey hockey_team passes authentic secretary tokenizer",
}
ASKED = {"s": names_secret, "a": always_secret, "p": names_secret_in_prose, "v": variable_holds_secret}


@pytest.mark.parametrize("true, name", [(true, name) for true, names in NAMES.items() for name in names.split()])
def test_name_is_decided_for_each_use(true, name):
    assert "".join(letter for letter, question in ASKED.items() if question(name)) == true


def test_working_folders_are_no_secrets():
    assert not variable_holds_secret("PWD") and not variable_holds_secret("OLDPWD") and variable_holds_secret("DB_PWD")
