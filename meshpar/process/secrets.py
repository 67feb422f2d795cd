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

_URL = re.compile(r"://[^\s\"']+")
_AUTHORITY, _AT = re.compile(r"://(?=([^/?#]*))"), re.compile("@(?!sha256:)")  # no digest of an image
_HEADER_IN_TEXT = re.compile(r"(authorization[\"']?\s*[:=]\s*[\"']?(?:\w+\s+)?)[^\s\"',]+", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=[?&#;])([\w.%-]+)=([^\s&#\"']+)")
_SIGNED = {"sig", "signature", "token", "key"}
_HEADER = re.compile(r"(\s*[\w-]+:\s*)(\S.*)", re.DOTALL)
_ASSIGNED = re.compile(
    r"(?<![\w.?&#-])(?P<before>(?P<quote>[\"']?)(?P<name>[\w.-]+)(?:(?P=quote)\s*=\s*|(?<=\w)[\"']\s*:\s*(?=[\"'])))"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s;\"']+)"
)
_OPTION = re.compile(r"(?<!\S)(?P<before>--?(?P<name>[A-Za-z][\w.-]*)\s+)(?P<value>\"[^\"]*\"|'[^']*'|[^\s-]\S*)")
_ALWAYS = {"secret", "password", "passwd", "pwd", "passphrase", "credential", "authorization", "bearer"}
_QUALIFIED = {"access", "account", "api", "auth", "hf", "hub", "private", "service", "session", "shared"}
_QUALIFIED |= {"anthropic", "aws", "azure", "client", "comet", "github", "gitlab", "huggingface", "mlflow", "neptune"}
_QUALIFIED |= {"openai", "refresh", "wandb"}
_JOINED = re.compile(rf"^({'|'.join(sorted(_QUALIFIED))})(keys?|tokens?)$")
_ELSEWHERE = {"ref", "refs", "name", "names", "file", "files", "path", "paths"}
"""Last words of names whose value says where a credential is."""
_OBJECT = {"name", "namespace", "secretName", "items", "key", "path", "mode", "defaultMode", "optional"}
"""Fields of an object of Kubernetes that says where a credential is."""
_VARIABLE = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*|\{[A-Z_][A-Z0-9_]*\}|\{\{.*\}\})", re.DOTALL)
_CODE = re.compile(r"(?=.*\d)[\w+/=.~:-]{6,}")  # a value that no word and no special token of a tokenizer is


def redact(text: str) -> str:
    """Return text without the credentials of its URLs and headers.

    >>> redact("API request to https://me:pw@host/x?token=t failed")
    'API request to https://***@host/x?token=*** failed'
    """
    text = _URL.sub(lambda match: _address(match[0]), text)
    text = _HEADER_IN_TEXT.sub(lambda match: match[1] + HIDDEN, text)
    text = _IN_URL.sub(_parameter, text)
    for pattern in (_ASSIGNED, _OPTION):
        text = pattern.sub(_assignment, text)
    header = _HEADER.fullmatch(text)
    return text if header is None or not _is_secret(header[1].strip(" :"), header[2]) else header[1] + HIDDEN


def _address(text: str) -> str:
    """Return URLs, which begin at a ``://``, without users. A password may have / ? #: it ends at the last ``@``."""
    last = max((match.start() for match in _AT.finditer(text)), default=-1)
    text_without, begin = "", 0
    for match in _AUTHORITY.finditer(text):
        start, authority = match.end(), match[1]
        user, colon, _ = authority.partition(":")
        end = start + authority.rfind("@") if {"<", ">"}.isdisjoint(authority) else -1
        end = last if colon and last > start + len(user) + 1 else end
        if start >= begin and end > start:
            text_without, begin = f"{text_without}{text[begin:start]}{HIDDEN}", end
    return text_without + text[begin:]


def _assignment(match: re.Match[str]) -> str:
    """Return ``NAME=value``, ``--name value`` or ``"name": "value"``, without the value if it is a credential."""
    name, value = match["name"].rpartition(".")[2], match["value"].strip("\"'")
    words = _words(name)
    sure = _CODE.fullmatch(value) is not None if words == ["token"] else _names_secret(words)
    return match["before"] + HIDDEN if sure and _is_secret(name, value) else match[0]


def _parameter(match: re.Match[str]) -> str:
    """Return a parameter of a URL, without its value if that is a credential or a signature."""
    words = _words(match[1])
    return f"{match[1]}={HIDDEN}" if _ALWAYS & set(words) or {*words[-1:]} & _SIGNED else match[0]


def redacted(data: Any) -> Any:  # noqa: ANN401 - plain data
    """Return plain data without credentials.

    >>> redacted({"uri": "postgresql://me:pw@db", "api_key": "a1b2", "eos_token": "</s>"})
    {'uri': 'postgresql://***@db', 'api_key': '***', 'eos_token': '</s>'}
    """
    if isinstance(data, Mapping):
        secret = {name for name, value in data.items() if _is_secret(name, value)}
        if _is_secret(data.get("name"), data.get("value")):
            secret.add("value")
        return {redacted(name): HIDDEN if name in secret else redacted(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        pairs = zip((None, *data), data, strict=False)
        return [HIDDEN if _is_option_of(before, value) else redacted(value) for before, value in pairs]
    if isinstance(data, bytes):
        text = data.decode("utf-8", "replace")
        return data if redact(text) == text else redact(text)
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
        for number, (before, value) in enumerate(zip((None, *data), data, strict=False)):
            if _is_option_of(before, value):
                yield (*place, number)
            else:
                yield from secrets_in(value, (*place, number))
    elif isinstance(data, str | bytes):
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        if redact(text) != text:
            yield place


def secret_words(words: Iterable[str]) -> list[str]:
    """Return the names of a command's words with a credential: ``--api-key=...``, ``--password ...``, a URL."""
    names, before = list[str](), ""
    for text in words:
        count = len(names)
        for word in text.split():
            name, equals, value = word.partition("=")
            if equals and (_is_secret(name.rpartition(".")[2].lstrip("-"), value) or redact(value) != value):
                names.append(name)
            elif redact(word) != word:
                names.append(redact(word))
            elif _is_option_of(before, word):
                names.append(before)
            before = "" if equals else word
        if len(names) == count and (shown := redact(text)) != text:
            names.append(shown)
    return names


def _is_option_of(before: object, word: object) -> bool:
    """Return whether a word is a credential by the word before, such as ``--password``."""
    return isinstance(before, str) and before.startswith("-") and _is_secret(before.lstrip("-"), word)


def _is_secret(name: object, value: object) -> bool:
    """Return whether a value is a credential by its name; under ``key`` or ``eos_token`` it must look like one."""
    if not isinstance(name, str) or _is_no_secret(value):
        return False
    words = _words(name)
    if words[-1:] and words[-1] in _ELSEWHERE:
        return False
    if _names_secret(words):
        return not (isinstance(value, int | float) and name.endswith("s"))  # a number of them
    if words[-1:] not in (["token"], ["key"]):
        return False
    return isinstance(value, str) and _CODE.fullmatch(value) is not None


def _names_secret(words: Sequence[str]) -> bool:
    """Return whether the words of a name are those of credentials alone."""
    if _ALWAYS & {*words, *(word.removesuffix("s") for word in words)} or words == ["token"]:
        return True
    return words[-1:] != [] and words[-1] in {"token", "key", "tokens", "keys"} and bool(_QUALIFIED & {*words[:-1]})


def _is_no_secret(value: object) -> bool:
    """Return whether a value is no credential whatever its name: nothing, a switch, a variable, or where one is."""
    if isinstance(value, Mapping):
        return all(map(_is_no_secret, value.values())) or {*value} <= _OBJECT
    if isinstance(value, list | tuple):
        return all(map(_is_no_secret, value))
    if isinstance(value, str):
        return value.startswith(HIDDEN) or value.lower() in ("", "true", "false") or bool(_VARIABLE.fullmatch(value))
    return value is None or value == b"" or isinstance(value, bool)


def _words(name: str) -> Sequence[str]:
    """Return the words of a name: ``access`` and ``token`` of ``accessToken`` and of ``accesstoken``."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return [part for word in words for part in _JOINED.sub(r"\1 \2", word).split()]
