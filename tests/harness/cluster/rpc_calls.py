"""What a call that passes the tap says."""

from __future__ import annotations

from jaxroll import wire
from jaxroll.records import Version, VersionRef
from jaxroll.store import messages as msg
from tests.harness.cluster.rpc_tap import Call


def claim_of(call: Call) -> int:
    """The step that is claimed."""
    return wire.decode(call.body, msg.ClaimCall).step


def ack_of(call: Call) -> int:
    """The step that is acknowledged."""
    return wire.decode(call.body, msg.VersionCall).version.step


def durable_of(call: Call) -> Version:
    """The version that is said to be durable."""
    return wire.decode(call.body, msg.VersionCall).version


def publish_of(call: Call) -> Version:
    """The version that is published."""
    return wire.decode(call.body, VersionRef).version
