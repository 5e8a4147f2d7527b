"""A job can be read by others: values of secrets are seen in it, and what only looks like one is let through."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from rlpost.config.load import config_directories, load_config
from rlpost.jobs.secrets import assigned_secret, is_secret_variable, secret_keys, shows_secret

SHIPPED = sorted(path for path in config_directories()[-1].glob("*.yaml"))


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "OPENAI_KEY", "WANDB_KEY", "WANDB_API_KEY", "HF_PAT", "GITHUB_AUTH", "DB_PASS", "DB_PASSPHRASE", "PGPASS",
             "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "--api-key"],
)  # fmt: skip
def test_variables_that_read_like_secrets(name: str) -> None:
    assert is_secret_variable(name)


@pytest.mark.parametrize(
    "name", ["MAX_TOKENS", "PATH", "BYPASS", "key", "--key", "MONKEY", "RAY_AUTH_MODE", "COMPASS", "TOKENIZERS_PARALLELISM"]
)
def test_variables_that_do_not(name: str) -> None:
    assert not is_secret_variable(name)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("export OPENAI_KEY=sk-abc", "OPENAI_KEY"),
        ("export HF_TOKEN='abc'", "HF_TOKEN"),
        ('export HF_TOKEN="abc"', "HF_TOKEN"),
        ("export HF_TOKEN='$abc'", "HF_TOKEN"),  # single quotes: the value itself
        ("--comment=API_KEY=abc", "API_KEY"),
        ("serve --api-key=abc", "api-key"),
        ("export INDEX=https://u:p@host/simple", "INDEX"),
        ("X=1 NAME=hf_abcdefghijkl12345678", "NAME"),
        ('export HF_TOKEN="$(cat ~/.hf)"', None),
        ("export HF_TOKEN=$(cat ~/.hf)", None),
        ('export HF_TOKEN="$OTHER"', None),
        ("export HF_TOKEN=`cat ~/.hf`", None),
        ("export HF_TOKEN=''", None),
        ("sort --key=2 rows", None),
        ("export INDEX=https://$USER:$TOKEN@host/simple", None),
    ],
)
def test_a_value_in_a_line_of_shell_is_seen_and_what_is_read_at_run_time_is_not(line: str, name: str | None) -> None:
    assert assigned_secret(line) == name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("pip install x --index-url https://u:p@host/simple", True), ("git+https://abcdef@host/x", True), ("postgresql://u:p@db/x", True),
        ("curl -H 'Authorization: Bearer sk-proj-abcd1234efgh'", True), ("AKIAABCDEFGHIJ234567", True),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", True), ("git clone ssh://git@host/x", False), ("https://host/a:b@c", False),
        ("hf_transformers_cache", False), ("task-12345678901234567890", False), ("https://host?x=a:b@c", False),
    ],
)  # fmt: skip
def test_texts_that_hold_a_secret_by_its_form(text: str, shown: bool) -> None:
    assert shows_secret(text) is shown


def test_values_of_a_configuration_are_seen_by_key_and_by_form() -> None:
    options = {
        "openai_key": "abc", "api_keys": ["a"], "url": "https://user:hunter2@h", "note": "use hf_abcdefghijkl12345678",
        "judge": {"mykey_key": "0123456789abcdef0123456789abcdef"},
    }  # fmt: skip
    assert list(secret_keys(options)) == ["openai_key", "api_keys.0", "url", "note", "judge.mykey_key"]
    plain = {"sort_key": "name", "primary_key": "id", "answer_key": "answer", "eos_token": "<|im_end|>", "key": "/data/key_id_ed25519_file",
             "openai_key": "", "max_tokens": "20", "url": "https://host/x"}  # fmt: skip
    assert list(secret_keys(plain)) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_configuration_that_comes_with_rlpost_is_refused(path: Path) -> None:
    assert list(secret_keys(asdict(load_config([f"config={path}"]).config))) == []
