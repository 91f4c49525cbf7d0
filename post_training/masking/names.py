"""Decide by the name whether a configuration key, a variable or an option holds a secret."""

from __future__ import annotations

import re
from functools import lru_cache

_WORD = re.compile(r"[Bb](?:ase|ASE)?64|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Words that always mean a secret as the last one of a name, written as one word or as two.
_ALWAYS = frozenset(
    "password passwords passwd passwds passphrase passphrases pwd pass pat pats secret secrets credential credentials "
    "creds webhook webhooks apikey apikeys accesskey secretkey privatekey authkey authtoken accesstoken apitoken "
    "authorization bearer cookie cookies auth".split()
)
# The same at the end of a longer word, as in PGPASSWORD.
_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "webhook", "credentials")
# In prose these are ordinary words.
_ORDINARY_WORDS = frozenset("pass pat pats secret secrets auth cookie cookies bearer token tokens credentials".split())
# A key is a secret after one of these words; `prompt_key` and `sort_key` name a column.
_KEY_OWNERS = frozenset(
    "access account admin aes api app auth client consumer deploy encryption hmac license master private rsa secret "
    "service session signing ssh storage subscription".split()
)
# A token after one of these words belongs to a tokenizer or is a number of tokens.
_TOKENIZER_WORDS = frozenset(
    "add audio begin bof boi bom bos box cls decoder end eof eoi eom eos eot first image last mask max min new next "
    "num object pad padding per prev previous prompt quad ref sep special start stop text think tool unk unknown video "
    "vision word".split()
)
_TOKENS_OWNERS = frozenset("access api auth bearer hf id login refresh security session".split())
# After the word that names a secret, these name the form in which it is given.
_FORMS = frozenset("id url uri value text b64 base64 plain header".split())
_NO_VARIABLES = frozenset({"PWD", "OLDPWD"})


@lru_cache(maxsize=4096)
def names_secret(name: str) -> bool:
    """Return whether a key such as `api_key`, `DB_PASSWD` or `wandbToken` holds a secret; `eos_token` does not."""
    return _means_secret(_words(name))


@lru_cache(maxsize=4096)
def always_secret(name: str) -> bool:
    """Return whether any value of this name is a secret: a number under `password` is one, under `token` it is not."""
    words = _without_form(_words(name))
    return bool(words) and (_is_always(words[-1]) or (words[-1] in ("key", "keys") and _means_secret(words)))


@lru_cache(maxsize=4096)
def names_secret_in_prose(name: str) -> bool:
    """Return whether `NAME: value` in prose reveals a secret; `token:` or `pass:` alone is an ordinary word there."""
    words = _words(name)
    return _means_secret(words) and not (len(words) == 1 and words[0] in _ORDINARY_WORDS)


@lru_cache(maxsize=4096)
def variable_holds_secret(name: str) -> bool:
    """Return whether a variable holds a secret: as `names_secret`, and also any whose name ends in KEY."""
    words = _without_form(_words(name))
    ends_in_key = bool(words) and words[-1] in ("key", "keys") and words[:-1] not in ([], ["prompt"], ["sort"])
    return name not in _NO_VARIABLES and (_means_secret(words) or ends_in_key)


def _words(name: str) -> list[str]:
    """Split a name: `WANDB_API_KEY`, `wandbApiKey` and `+trainer.wandb-api-key` give wandb, api and key."""
    return [word.lower() for word in _WORD.findall(name[-200:].rpartition(".")[2])]


def _is_always(word: str) -> bool:
    return word in _ALWAYS or word.endswith(_ENDINGS)


def _without_form(words: list[str]) -> list[str]:
    return words[:-1] if len(words) > 1 and words[-1] in _FORMS else words


def _means_secret(words: list[str]) -> bool:
    words = _without_form(words)
    if not words:
        return False
    last, owner = words[-1], words[-2] if len(words) > 1 else ""
    if _is_always(last):
        return True
    if last in ("key", "keys"):
        return owner in _KEY_OWNERS
    if last == "token":
        return owner not in _TOKENIZER_WORDS
    return last == "tokens" and owner in _TOKENS_OWNERS
