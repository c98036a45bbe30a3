"""What is on its way in a FakeNetwork, and what can befall it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from kvtransfer.session import SessionKey
from kvtransfer.transports.runs import RunHeader


class Fault(Enum):
    """What can befall one run on its way."""

    DROP = auto()
    """It never arrives, and nobody is told."""
    DELAY = auto()
    """It is held until `FakeNetwork.release_delayed`, while others pass."""
    REORDER = auto()
    """It overtakes the run before it, when that is still on its way."""
    DUPLICATE = auto()
    """It arrives twice."""
    CORRUPT = auto()
    """One bit of its payload is turned."""
    CUT = auto()
    """Half of it arrives, then the connection is lost."""


@dataclass(frozen=True, slots=True)
class OpenPacket:
    """A session's secret on its way."""

    key: SessionKey
    secret: bytes


@dataclass(frozen=True, slots=True)
class RunPacket:
    """A run on its way; cut_at_bytes: where the connection is lost, None for nowhere."""

    header: RunHeader
    payload: bytes
    cut_at_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerPacket:
    """An answer on its way back; number 0 answers an OpenPacket."""

    key: SessionKey
    number: int
    is_accepted: bool
