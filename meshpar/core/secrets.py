"""Credentials: find them in data that meshpar keeps or shows, and strike them out of what it writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

REMEDY = (
    "credentials come from the environment, such as MLFLOW_TRACKING_URI or WANDB_API_KEY for a tracker and the usual "
    "variables of a store: set the variable on the machines of the job, and remove the value here"
)
HIDDEN = "***"

_IN_TEXT = (
    # user and password of a URL, whose password may have / ? # as they are; no digest of an image beside a port
    re.compile(r"(?<=://)(?:[^\s/?#:\"']*:[^\s\"']{1,2000}(?=@(?!sha256:))|[^\s/?#\"'<>]+(?=@))"),
    re.compile(r"(authorization[\"']?\s*[:=]\s*[\"']?(?:\w+\s+)?)[^\s\"',]+", re.IGNORECASE),
)
_IN_URL = re.compile(r"(?<=[?&#;])([\w.%-]+)=([^\s&#\"']+)")
_SIGNED = {"sig", "signature", "token", "key"}
_ALWAYS = {"secret", "secrets", "password", "passwd", "pwd", "passphrase", "credential", "credentials", "apikey"}
_QUALIFIED = {"access", "account", "api", "auth", "hf", "hub", "private", "service", "session", "shared"}
_JOINED = re.compile(rf"^({'|'.join(sorted(_QUALIFIED))})(keys?|tokens?)$")
_CODE = re.compile(r"(?=.*\d)[\w+/=.~:-]{6,}")  # a value that no word and no special token of a tokenizer is


def redact(text: str) -> str:
    """Return text without the credentials of its URLs and headers.

    >>> redact("API request to https://me:pw@host/x?token=t failed")
    'API request to https://***@host/x?token=*** failed'
    """
    for pattern in _IN_TEXT:
        text = pattern.sub(lambda found: (found[1] if found.lastindex else "") + HIDDEN, text)
    return _IN_URL.sub(_parameter, text)


def _parameter(found: re.Match[str]) -> str:
    """Return a parameter of a URL, without its value if that is a credential or a signature."""
    words = _words(found[1])
    return f"{found[1]}={HIDDEN}" if _ALWAYS & set(words) or {*words[-1:]} & _SIGNED else found[0]


def redacted(data: Any) -> Any:  # noqa: ANN401 - plain data
    """Return plain data without credentials.

    >>> redacted({"uri": "postgresql://me:pw@db", "api_key": "a1b2", "eos_token": "</s>"})
    {'uri': 'postgresql://***@db', 'api_key': '***', 'eos_token': '</s>'}
    """
    if isinstance(data, Mapping):
        return {name: HIDDEN if _is_secret(name, value) else redacted(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [redacted(value) for value in data]
    return redact(data) if isinstance(data, str) else data


def secrets_in(data: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:  # noqa: ANN401
    """Yield the places of plain data at which there is a credential. ``{name: ..., value: ...}`` is a variable, too."""
    if isinstance(data, Mapping):
        if _is_secret(data.get("name"), data.get("value")):
            yield (*place, "value")
        for name, value in data.items():
            if _is_secret(name, value):
                yield (*place, name)
            else:
                yield from secrets_in(value, (*place, name))
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from secrets_in(value, (*place, number))
    elif isinstance(data, str) and redact(data) != data:
        yield place


def secret_words(words: Iterable[str]) -> list[str]:
    """Return the names of the words of a command that have a credential: ``--api-key=...``, ``--password ...``,
    ``WANDB_API_KEY=...``, a URL.
    """
    found: list[str] = []
    before = ""
    for word in [part for text in words for part in text.split()]:
        name, equals, value = word.partition("=")
        if equals and (_is_secret(name.rpartition(".")[2].lstrip("-"), value) or redact(value) != value):
            found.append(name)
        elif redact(word) != word:
            found.append(redact(word))
        elif before.startswith("-") and _is_secret(before.lstrip("-"), word):
            found.append(before)
        before = "" if equals else word
    return found


def _is_secret(name: object, value: object) -> bool:
    """Return whether a value is a credential by its name. Names such as ``key`` and ``eos_token`` have other uses, so
    that their value must look like one, too.
    """
    if not isinstance(name, str) or not isinstance(value, str) or not value or value == HIDDEN:
        return False
    parts = _words(name)
    if _ALWAYS & set(parts) or parts == ["token"]:
        return True
    if parts[-1:] not in (["token"], ["key"]):
        return False
    return bool(_QUALIFIED & set(parts[:-1])) or _CODE.fullmatch(value) is not None


def _words(name: str) -> Sequence[str]:
    """Return the words of a name, such as ``access`` and ``token`` of ``accessToken``, ``access_token`` and
    ``accesstoken``.
    """
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return [part for word in words for part in _JOINED.sub(r"\1 \2", word).split()]
