"""More than thirty kinds of secrets as users have them; each text reveals VALUE unless it is masked."""

VALUE = "Zq8-hunter2xK9"
JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"

# Secrets with a telling name, in every notation that logs, command lines and files use for name and value.
NAMES = (
    "WANDB_API_KEY SWANLAB_API_KEY HF_TOKEN wandb_token MODELSCOPE_API_TOKEN GITHUB_PAT my_pat DB_PASSWD db_pass "
    "PGPASSWORD SSH_PASSPHRASE AWS_SECRET_ACCESS_KEY client_secret clientSecret private_key FEISHU_WEBHOOK webhook_url "
    "access-token refresh_token ENCRYPTION_KEY MINIO_CREDENTIALS session_cookie smtp_auth registry_creds REDIS_PWD"
).split()
NOTATIONS = (
    "{name}={value}",
    "export {name}={value}",
    '{{"{name}": "{value}"}}',
    "{{'{name}': '{value}'}}",
    '{{\\"{name}\\": \\"{value}\\"}}',
    "{name}: {value}",
    "+trainer.{name}={value} data.seed=1",
    "'++a.b.{name}=x {value}' data.seed=1",
    "'~a.b.{name}=x {value}' data.seed=1",
    "{name}=[x,{value}]",
    '{name}="x {value}"',
    "--{name} {value}",
    "--{name}={value}",
)
# Secrets that are recognised by their form, whatever precedes them.
SHAPES = (
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "11ABCDEFG0" * 6,
    "glpat-" + "a1B2-" * 4,
    "hf_" + "AbCdEfGh" * 4 + "1",
    "AKIA" + "IOSFODNN7EXAMPLE"[:16],
    "LTAI" + "5tAbCdEfGhIjKlMn",
    "sk-" + "a1B2c3D4" * 6,
    "sk-proj-" + "a1B2_c3-" * 6,
    "sk-ant-" + "api03-a1B2_" * 4,
    "xoxb-" + "123456789012-abcDEF",
    "AIza" + "SyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q"[:35],
    "npm_" + "a1B2c3D4e5" * 4,
    "SG." + "a1B2c3D4e5F6g7H8" + "." + "i9J0k1L2m3N4o5P6",
    JWT,
)
ADDRESSES = (
    f"https://me:{VALUE}@host/path",
    f"redis://:{VALUE}@10.0.0.1:6379/0",
    f"https://host/x?access_token={VALUE}&page=2",
    f"https://host/x?page=2&key={VALUE}",
    f"https://b.s3.amazonaws.com/k?X-Amz-Signature={VALUE}",
    f"https://hooks.slack.com/services/T00/B00/{VALUE}",
    f"https://open.feishu.cn/open-apis/bot/v2/hook/{VALUE}",
    f"https://oapi.dingtalk.com/robot/send?access_token={VALUE}",
    f"https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={VALUE}",
    f"https://discord.com/api/webhooks/123/{VALUE}",
    f"https://x.webhook.office.com/webhookb2/{VALUE}",
)
HEADERS = (
    f"Authorization: Bearer {VALUE}",
    f"authorization: Basic {VALUE}",
    f"{{'Authorization': 'Bearer {VALUE}'}}",
    f"Bearer {VALUE}",
    f"Cookie: sid={VALUE}",
    f"curl -H 'PRIVATE-TOKEN: {VALUE}' https://host",
    f"X-Api-Key: {VALUE}",
)
KEY_BLOCK = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{VALUE}\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n"


def texts() -> list[tuple[str, str]]:
    """Return every text with the secret that must not remain in it."""
    named = [(form.format(name=name, value=VALUE), VALUE) for name in NAMES for form in NOTATIONS]
    shaped = [(f"the key is {shape}, as it was", shape) for shape in SHAPES]
    return [*named, *shaped, *((each, VALUE) for each in (*ADDRESSES, *HEADERS, KEY_BLOCK))]
