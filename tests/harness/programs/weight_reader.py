"""A sampler's process that maps a version published with `transfer.channel=shm` and keeps it until it is killed.

    python weight_reader.py ANNOUNCEMENT     the announcement as hex

It prints "mapped" when it holds the version, and ends with its stdin.
"""

from __future__ import annotations

import contextlib
import sys

from jaxroll import wire
from jaxroll.records import VersionRef
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.channel_shm import ShmReader
from jaxroll.transfer.channels import Deadline


def main() -> None:
    announced = wire.decode(bytes.fromhex(sys.argv[1]), VersionRef)
    with contextlib.closing(ShmReader(announced.address, announced.version, "", Deadline(30.0, "reading"))) as reader:
        manifest = manifests.decode(reader.manifest(), announced)
        held = [reader.view(manifest, number, 0) for number in range(len(manifest.leaves))]
        reader.read(manifest, [])
    del reader  # from here on only `held` keeps the memory
    print("mapped", flush=True)
    sys.stdin.read()
    del held


if __name__ == "__main__":
    main()
