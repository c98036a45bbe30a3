"""The version of the control protocol, and who may serve together.

Processes at most one version apart serve together, so that a cluster can be upgraded one process at
a time. Others are refused by name, on the first frame of a stream.
"""

from __future__ import annotations

from core.errors import ProtocolMismatch

PROTOCOL_VERSION = 1
"""What this process speaks. Raised by one when the meaning of frames changes; added fields do not
raise it.
"""

RECORD_SCHEMA_VERSION = 1
"""The schema of worker records, on the wire and in the index."""


def check_version(peer_version: int, who: str) -> None:
    """Accept a peer at most one version away; raise ProtocolMismatch naming `who` and both versions
    otherwise.
    """
    if abs(peer_version - PROTOCOL_VERSION) > 1:
        raise ProtocolMismatch(
            f"{who} speaks protocol version {peer_version} and this process {PROTOCOL_VERSION}; "
            "only versions at most one apart serve together"
        )
