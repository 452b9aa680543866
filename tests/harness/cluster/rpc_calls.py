"""Contents of calls that pass the tap."""

from __future__ import annotations

from jaxroll import wire
from jaxroll.records import Version, VersionRef
from jaxroll.store import messages as msg
from tests.harness.cluster.rpc_tap import Call


def claim_of(call: Call) -> int:
    """The claimed step."""
    return wire.decode(call.body, msg.ClaimCall).step


def ack_of(call: Call) -> int:
    """The acknowledged step."""
    return wire.decode(call.body, msg.VersionCall).version.step


def durable_of(call: Call) -> Version:
    """The durable version."""
    return wire.decode(call.body, msg.VersionCall).version


def publish_of(call: Call) -> Version:
    """The published version."""
    return wire.decode(call.body, VersionRef).version
