"""Mask secrets recognised by their form alone: tokens of well-known services, addresses, headers and keys."""

from __future__ import annotations

import re
from collections.abc import Callable

MASK = "***"
_START = r"(?<![A-Za-z0-9])"
# As their issuers document them; the lengths exclude identifiers such as hf_config or sk-learn.
_TOKENS = re.compile(
    _START + r"(?:gh[opsur]_[A-Za-z0-9]{16,255}|github_pat_[A-Za-z0-9_]{22,255}|gl(?:pat|ptt|rt|cbt|dt)-[\w-]{16,300}"
    r"|hf_[A-Za-z0-9]{20,100}|api_org_[A-Za-z0-9]{20,100}|(?:AKIA|ASIA|AGPA|AROA)[A-Z0-9]{16}|LTAI[A-Za-z0-9]{12,30}"
    r"|AKLT[A-Za-z0-9]{20,60}|sk-(?:(?:proj|ant|svcacct|or|admin)-[\w-]{16,300}|[A-Za-z0-9]{20,300})"
    r"|[sr]k_(?:live|test)_[A-Za-z0-9]{10,120}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,300}|xapp-[A-Za-z0-9-]{20,300}|AIza[\w-]{35}|ya29\.[\w-]{20,600}|npm_[A-Za-z0-9]{30,60}"
    r"|pypi-[\w-]{40,400}|dop_v1_[a-f0-9]{64}|glsa_[A-Za-z0-9_]{30,60}|SG\.[\w-]{16,32}\.[\w-]{16,64}"
    r"|eyJ[\w-]{8,4000}\.[\w-]{8,8000}\.[\w-]{0,2000})"
)
KEY_BEGINS = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY-----")
KEY_ENDS = re.compile(r"-----END (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY-----")
_USER_IN_ADDRESS = re.compile(r"(://)[^/@\s'\"]{1,500}@")
_PARAMETER = re.compile(
    r"(?i)([?&](?:[a-z_-]{0,40}(?:token|secret|password|passwd|signature|credential)|(?:api[_-]?|access[_-]?|x-)?key|"
    r"auth|sig|sign|awsaccesskeyid|accesskeyid|code)=)[^&\s'\"#]{1,4000}"
)
# Web hooks, to which anybody who knows the address can post: Slack, Discord, Teams, Feishu, WeCom, DingTalk and others.
_HOOK = re.compile(
    r"(?i)(https?://[^\s/'\"]{1,250}/(?:[^\s?#'\"]{0,200}/)?(?:services|[\w-]{0,20}hooks?b?2?|robot/send)(?=[/?])/?)"
    r"[^\s'\"<>]{6,1000}"
)
_HOOK_HOST = re.compile(r"(?i)(https?://hooks?\.[^\s/'\"]{1,250}/)[^\s'\"<>]{6,1000}")
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|x-(?:api-key|auth-token|access-token|amz-security-token)"
    r"|(?:private|job|deploy)-token|api-key)"
    r"(\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?)((?:(?:bearer|basic|token|digest|apikey|negotiate)\s{1,3})?)[^\s\"'\\,;]{1,8000}"
)
_BEARER = re.compile(r"(?i)\b(bearer\s{1,3})(?=[\w.~+/=-]{0,200}[0-9])[\w.~+/=-]{12,8000}")


def _assigned(name: str) -> Callable[[re.Match[str]], str]:
    return lambda match: f"{match[1]}{MASK}{name}"


def mask_shapes(text: str) -> str:
    """Mask everything in a text that has the form of a secret, in time linear in its length."""
    if "-----BEGIN" in text:
        text = _mask_private_keys(text)
    if "://" in text:
        text = _USER_IN_ADDRESS.sub(_assigned("@"), text)
        text = _HOOK_HOST.sub(_assigned(""), _HOOK.sub(_assigned(""), text))
    if "=" in text:
        text = _PARAMETER.sub(_assigned(""), text)
    text = _HEADER.sub(lambda match: f"{match[1]}{match[2]}{match[3]}{MASK}", text)
    return _TOKENS.sub(MASK, _BEARER.sub(_assigned(""), text))


def _mask_private_keys(text: str) -> str:
    """Mask PEM keys, including one whose end is missing."""
    parts, behind = [], 0
    while begin := KEY_BEGINS.search(text, behind):
        end = KEY_ENDS.search(text, begin.end())
        parts += [text[behind : begin.start()], MASK]
        behind = end.end() if end else len(text)
    return "".join([*parts, text[behind:]])
