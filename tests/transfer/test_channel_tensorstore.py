"""The tensorstore channel on a folder: half-written versions, damaged chunks, clearing up."""

from __future__ import annotations

import numpy as np
import pytest
import tensorstore as ts

from jaxroll.errors import ConfigError, DigestMismatch, TransferError, VersionGone
from jaxroll.records import Version, VersionRef
from jaxroll.transfer.channel_tensorstore import TensorstoreSender, url_of


def _fetch(kit, announced):
    return kit.receiver().fetch(announced, kit.shardings((1, 1, 2), "sampler"), kit.abstract(kit.shapes))


def test_it_is_a_zarr_array_that_other_tools_can_open(kit) -> None:
    values = kit.values(0)
    announced = kit.publisher("tensorstore", dtype="bfloat16").publish(
        Version(2, 7), kit.params(values, kit.shardings((1, 2, 1), "learner"))
    )
    folder = kit.folder / "transfer" / "2.7"
    assert announced.address == f"file://{folder}"
    stored = ts.open({"driver": "zarr3", "kvstore": f"file://{folder}/embed/"}, open=True).result(timeout=10)
    assert stored.dtype.name == "bfloat16"
    np.testing.assert_allclose(stored.read().result(timeout=10).astype(np.float32), values["embed"], rtol=1e-2)


def test_a_version_without_a_manifest_does_not_exist_and_is_cleared_away(kit) -> None:
    sender = TensorstoreSender(kit.folder / "w")
    taken = kit.host_snapshot(Version(0, 1), kit.values(0))
    sender.offer(taken)
    sender.offer(kit.host_snapshot(Version(0, 2), kit.values(0)))
    (kit.folder / "w" / "0.1" / "manifest.msgpack").unlink()  # as a publisher killed while writing leaves it
    other = kit.folder / "w" / "notes.txt"
    other.write_text("not ours")
    assert sender.versions() == (Version(0, 2),)

    restarted = TensorstoreSender(kit.folder / "w")
    assert restarted.versions() == (Version(0, 2),)
    assert sorted(path.name for path in (kit.folder / "w").iterdir()) == ["0.2", "notes.txt"]


def test_old_versions_leave_no_folders(kit) -> None:
    sender = TensorstoreSender(kit.folder / "w", keep=1)
    for step in (9, 10, 11):
        sender.offer(kit.host_snapshot(Version(0, step), kit.values(step)))
    assert [path.name for path in (kit.folder / "w").iterdir()] == ["0.11"]


ODD_NAMES = ["a%20c", "a b", "50%", "a?b", "a#b", "a|b", "sweep[lr=1e-4]", "größe", "a:b", "'q\"", "~x", "a&b=c"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_folder_of_any_name_holds_the_newest_versions_and_nothing_else_is_written(kit, name: str) -> None:
    sender = TensorstoreSender(kit.folder / name, keep=2)
    for step in range(4):
        address = sender.offer(kit.host_snapshot(Version(0, step), kit.values(step)))
    assert [path.name for path in kit.folder.iterdir()] == [name]
    assert sorted(path.name for path in (kit.folder / name).iterdir()) == ["0.2", "0.3"]
    announced = VersionRef(
        Version(0, 3), "tensorstore", address, kit.host_snapshot(Version(0, 3), kit.values(3)).manifest_digest
    )
    np.testing.assert_array_equal(np.asarray(_fetch(kit, announced).place()["embed"]), kit.values(3)["embed"])


@pytest.mark.parametrize("name", ["a\\b", "a\nb", "a\udcffb"])
def test_a_folder_that_tensorstore_would_write_elsewhere_is_refused(kit, name: str) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.path"):
        TensorstoreSender(kit.folder / name)
    assert list(kit.folder.iterdir()) == []


def _chunks(kit, leaf: str):
    return sorted(
        path
        for path in (kit.folder / "transfer" / "0.1" / leaf).rglob("*")
        if path.name != "zarr.json" and path.is_file()
    )


def test_a_flipped_byte_on_disk_is_a_digest_mismatch(kit) -> None:
    announced = kit.publisher("tensorstore").offer(kit.host_snapshot(Version(0, 1), kit.values(0)))
    chunk = _chunks(kit, "embed")[0]
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(DigestMismatch, match="embed"):
        _fetch(kit, announced)


def test_a_flipped_byte_is_seen_by_a_host_that_holds_part_of_the_leaf(kit) -> None:
    """It cannot sum up the leaf: the checksum stored with every chunk is all it has."""
    announced = kit.publisher("tensorstore").offer(kit.host_snapshot(Version(0, 1), {"w": np.ones((8, 8), np.float32)}))
    (chunk,) = _chunks(kit, "w")
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)

    class FirstRow:
        def addressable_devices_indices_map(self, shape):
            return {"device": (slice(0, 1), slice(None))}

    with pytest.raises(DigestMismatch, match="DATA_LOSS"):
        kit.receiver().fetch(announced, {"w": FirstRow()}, kit.abstract({"w": (8, 8)}))


def test_a_lost_chunk_is_an_error_not_zeros(kit) -> None:
    announced = kit.publisher("tensorstore").offer(kit.host_snapshot(Version(0, 1), kit.values(0)))
    _chunks(kit, "embed")[0].unlink()
    with pytest.raises(TransferError, match="NOT_FOUND"):
        _fetch(kit, announced)


def test_a_version_removed_while_it_is_read_is_gone(kit, monkeypatch) -> None:
    from jaxroll.transfer import ends

    publisher = kit.publisher("tensorstore")
    announced = publisher.offer(kit.host_snapshot(Version(0, 1), kit.values(0)))
    checked = ends.manifests.check

    def newer_versions_come(*given: object) -> None:
        checked(*given)
        for step in (2, 3):
            publisher.offer(kit.host_snapshot(Version(0, step), kit.values(step)))

    monkeypatch.setattr(ends.manifests, "check", newer_versions_come)
    with pytest.raises(VersionGone, match=r"0\.1"):
        _fetch(kit, announced)


def test_zeros_are_written(kit) -> None:
    values = {name: np.zeros_like(value) for name, value in kit.values(0).items()}
    values["bias"] = -values["bias"]
    announced = kit.publisher("tensorstore").offer(kit.host_snapshot(Version(0, 1), values))
    got = _fetch(kit, announced).place()
    assert np.signbit(np.asarray(got["bias"])).all()
    assert not np.asarray(got["embed"]).any()


def test_a_path_of_one_s_own(kit) -> None:
    publisher = kit.publisher("tensorstore", path=str(kit.folder / "elsewhere"))
    announced = publisher.offer(kit.host_snapshot(Version(0, 1), kit.values(0)))
    assert announced.address == f"file://{kit.folder}/elsewhere/0.1"
    assert _fetch(kit, announced).version == Version(0, 1)
    assert url_of("gs://bucket/prefix") == "gs://bucket/prefix/"


def test_large_leaves_are_read_in_part(kit) -> None:
    """A receiver of one row opens one chunk: the others may be damaged without it noticing."""
    big = {"w": np.arange(4096 * 1024, dtype=np.float32).reshape(4096, 1024)}  # 16 MiB
    announced = kit.publisher("tensorstore").offer(kit.host_snapshot(Version(0, 1), big))
    chunks = _chunks(kit, "w")
    assert len(chunks) == 4
    for chunk in chunks[1:]:
        chunk.write_bytes(b"x")

    class FirstRow:
        def addressable_devices_indices_map(self, shape):
            return {"device": (slice(0, 1), slice(None))}

    staged = kit.receiver().fetch(announced, {"w": FirstRow()}, kit.abstract({"w": (4096, 1024)}))
    (row,) = staged._leaves[0].buffers.values()
    np.testing.assert_array_equal(row.view(np.float32)[0], big["w"][0])
