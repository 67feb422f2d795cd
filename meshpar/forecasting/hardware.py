"""Hardware profiles: what a machine can do and what of it training reaches, as a small YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Literal, final

from meshpar._torch.operator_costs import FLOAT8
from meshpar.core.errors import MeshparError, brief
from meshpar.core.patterns import suggestion
from meshpar.process.devices import PEAK_FLOPS
from meshpar.process.imports import need

Verdict = Literal["fits", "may fit", "does not fit"]

_LEVELS = 4  # largest depth of a profile's YAML
RESERVED_RANGE = (1.07, 1.35)
"""Bytes that torch's allocator reserves over the forecast peak of tensors: least and most of published runs."""


def reserved_range(peak: float) -> tuple[float, float]:
    """Return the least and the most bytes that an allocator reserves for tensors of ``peak`` bytes."""
    return peak * RESERVED_RANGE[0], peak * RESERVED_RANGE[1]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Describe one kind of accelerator and the links between several.

    Attributes:
        name: name of the profile.
        peak: dtype -> dense floating-point operations per second, as stated by the maker, float8 for both formats; in
            a YAML also the name of a device in :data:`meshpar.process.devices.PEAK_FLOPS`.
        memory: bytes of device memory.
        reserved: bytes of this memory that tensors cannot use: the driver's context, collectives' buffers.
        memory_bandwidth: bytes per second of device memory, as stated by the maker.
        matmul: fraction of ``peak`` that a large matrix product sustains at full power.
        attention_forward, attention_backward: fractions of ``peak`` that fused attention sustains.
        clock: share of the full-power card's clock that this card's power limit allows under load.
        tile: size of a matrix product's dim at which it reaches half of its fraction.
        memory_fraction: fraction of ``memory_bandwidth`` that element-wise kernels reach.
        node: accelerators in a node.
        node_bandwidth: bytes per second to the others of the node (one direction), as stated by the maker.
        switched: any two accelerators of a node reach ``node_bandwidth``; otherwise a pair has its share of the links.
        node_fraction: fraction of ``node_bandwidth`` that collectives reach.
        network_bandwidth: bytes per second that an accelerator sends to other nodes.
        network_fraction: fraction of ``network_bandwidth`` that collectives reach.
        node_latency, network_latency: seconds before a collective's first byte, and for each further node.
        contention: fraction by which compute is slower during a collective.
        launch: seconds that the device needs between two kernels.
        host: seconds that the host needs to issue an operator.
        sources: origin of the numbers.
    """

    name: str
    peak: Mapping[str, float]
    memory: float
    reserved: float
    memory_bandwidth: float
    matmul: float
    attention_forward: float
    attention_backward: float
    clock: float = 1.0
    tile: float
    memory_fraction: float
    node: int
    node_bandwidth: float
    switched: bool = True
    node_fraction: float
    network_bandwidth: float
    network_fraction: float
    node_latency: float
    network_latency: float
    contention: float
    launch: float
    host: float
    sources: str = ""

    @classmethod
    def load(cls, source: str | Path) -> Hardware:
        """Read a profile that comes with meshpar, by its name, or a YAML file; raises MeshparError if it cannot."""
        names = profiles()
        path = names.get(str(source), Path(source))
        if not path.is_file():
            raise MeshparError(
                f"no hardware profile {source}; {suggestion(str(source), names)}; or give a YAML file with the fields "
                "of Hardware"
            )
        yaml, text, depth = need("yaml"), path.read_text(), 0
        try:
            for event in yaml.parse(text):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if isinstance(event, yaml.AliasEvent):
                    raise MeshparError(f"hardware profile {source} has aliases (*name); write the values out")
                if depth > _LEVELS:
                    raise MeshparError(f"hardware profile {source} has more than {_LEVELS} levels; expected fields")
            return cls.of(yaml.safe_load(text), str(source))
        except (yaml.YAMLError, ValueError) as error:
            raise MeshparError(f"hardware profile {source} is not YAML: {brief(error)}") from error

    @classmethod
    def of(cls, data: object, where: str) -> Hardware:
        """Return the profile that ``data`` describes; ``where`` is for messages."""
        if not isinstance(data, Mapping):
            raise MeshparError(f"{where} holds a {type(data).__name__}; expected the fields of Hardware")
        names = {field.name for field in fields(cls)}
        optional = {"clock", "switched", "sources"}
        problems = [f"unknown field {name}" for name in data if name not in names]
        problems += [f"missing field {name}" for name in sorted(names - optional - set(data))]
        if problems:
            raise MeshparError(f"hardware profile {where}: {'; '.join(problems)}")
        profile = cls(**{name: _number(name, value, where) for name, value in data.items()})  # type: ignore[arg-type]
        if not 0 <= profile.reserved < profile.memory:
            raise MeshparError(
                f"hardware profile {where}: reserved is {profile.reserved:g} bytes of a memory of {profile.memory:g}; "
                "expected a part of it"
            )
        return profile

    @property
    def room(self) -> float:
        """Bytes of device memory that tensors can use."""
        return self.memory - self.reserved

    def verdict(self, peak: float) -> Verdict:
        """Return whether what an allocator reserves for ``peak`` bytes of tensors has room: always, at times, never."""
        least, largest = reserved_range(peak)
        return "fits" if largest <= self.room else "may fit" if least <= self.room else "does not fit"

    def flops(self, dtype: str) -> float:
        """Return the peak for ``dtype``, unlisted as float32's; raises MeshparError where float8 is not listed."""
        if dtype == FLOAT8 and FLOAT8 not in self.peak:
            listed = ", ".join(self.peak)
            raise MeshparError(
                f"{self.name} has no speed for float8 (its peak has {listed}); leave Float8 out, or add peak.float8 to "
                "it"
            )
        return self.peak.get(dtype, self.peak["float32"])


def profiles() -> dict[str, Path]:
    """Return the profiles that come with meshpar, by name."""
    folder = Path(str(resources.files("meshpar.forecasting") / "profiles"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


_MAY_BE_0 = ("reserved", "contention", "launch", "host", "node_latency", "network_latency", "tile")


def _number(name: str, value: object, where: str) -> object:
    if name in ("name", "sources"):
        return str(value)
    if name == "switched":
        return bool(value)
    if name == "peak":
        value = PEAK_FLOPS.get(value, value) if isinstance(value, str) else value
        if not isinstance(value, Mapping) or "float32" not in value:
            raise MeshparError(
                f"hardware profile {where}: peak is {value!r}; expected operations a second by dtype, with float32, "
                "or the name of a device such as H100"
            )
        return {str(dtype): _number(f"peak.{dtype}", number, where) for dtype, number in value.items()}
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise MeshparError(f"hardware profile {where}: {name} is {value!r}, expected a number") from None
    if number < 0 or (number == 0 and name not in _MAY_BE_0):
        raise MeshparError(f"hardware profile {where}: {name} is {value!r}, expected a positive number")
    return int(number) if name == "node" else number
