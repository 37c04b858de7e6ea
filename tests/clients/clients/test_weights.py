"""The weight store: atomic visibility, idempotence, digests, and the same over another file system."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import fsspec
import pytest

from tests.weight_proofs import ANY_PROOF
from trackway.clients import weights as module
from trackway.clients.publisher_lock import FlockPublisherLock, LeasePublisherLock
from trackway.clients.weights import WeightStore, WholeWeights, version_of
from trackway.system import LockTaken, locked
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import WeightOffer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    (folder / "config.json").write_bytes(b"{}")
    return folder


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.stores)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightStore]:
    urls = {"file": str(tmp_path / "store"), "memory": f"memory://{tmp_path.name}"}
    bucket = request.getfixturevalue("object_store") if request.param == "s3" else ""
    yield WeightStore(urls.get(request.param, f"{bucket}/{tmp_path.name}"))
    fsspec.filesystem("memory").store.clear()


def change(source: Path, content: bytes) -> Path:
    (source / "model.safetensors").write_bytes(content)
    return source


def test_an_empty_store_has_no_latest_version(store: WeightStore) -> None:
    assert store.latest() is None
    assert store.versions() == []


def test_a_published_version_is_the_latest_and_fetched_whole(store: WeightStore, source: Path, tmp_path: Path) -> None:
    store.publish(1, "run-a", source, ANY_PROOF)
    latest = store.latest()
    assert latest is not None
    assert (latest.version, latest.run, latest.path) == (1, "run-a", "1")
    assert store.manifest(1).proof == ANY_PROOF
    assert [(f.name, f.size) for f in store.manifest(1).files] == [("config.json", 2), ("model.safetensors", 3)]
    assert (store.fetch(1, tmp_path / "cache") / "model.safetensors").read_bytes() == b"one"
    assert store.fetched_bytes == (0 if store.is_folder else 5)


def test_an_offer_stands_until_the_next_one_or_until_it_is_withdrawn(store: WeightStore) -> None:
    assert store.offered() is None
    for version in (1, 2):
        store.offer(WeightOffer(version=version, chunks=[]))
        assert store.offered() == WeightOffer(version=version, chunks=[])
    for _ in range(2):
        store.withdraw()
        assert store.offered() is None


def test_an_offer_that_cannot_be_read_is_none(store: WeightStore) -> None:
    store.offer(WeightOffer(version=1, chunks=[]))
    store._fs.pipe_file(f"{store._root}/offer.json", b"{")

    assert store.offered() is None


def test_publishing_the_same_version_again_changes_nothing(store: WeightStore, source: Path) -> None:
    first = store.publish(1, "run-a", source, ANY_PROOF)
    store.publish(2, "run-a", change(source, b"two"), ANY_PROOF)
    assert store.publish(1, "run-a", change(source, b"one"), ANY_PROOF) == first
    assert store.versions() == [1, 2]
    latest = store.latest()
    assert latest is not None and latest.version == 2


def test_publishing_a_version_again_with_other_files_is_a_conflict(store: WeightStore, source: Path) -> None:
    store.publish(1, "run-a", source, ANY_PROOF)
    with pytest.raises(TrackwayError, match="already published by run-a with other digests") as raised:
        store.publish(1, "run-b", change(source, b"other"), ANY_PROOF)
    assert raised.value.code is ErrorCode.CONFLICT
    assert store.manifest(1).run == "run-a"


def test_a_version_below_the_latest_is_a_conflict_that_names_the_latest(store: WeightStore, source: Path) -> None:
    store.publish(5, "run-a", source, ANY_PROOF)
    with pytest.raises(TrackwayError) as raised:
        store.publish(3, "run-b", source, ANY_PROOF)
    assert raised.value.code is ErrorCode.CONFLICT
    assert raised.value.detail == {"version": 3, "latest": 5}


def test_a_file_that_differs_from_its_digest_is_refused(store: WeightStore, source: Path, tmp_path: Path) -> None:
    manifest = store.publish(1, "run-a", source, ANY_PROOF)
    file = manifest.files[1]
    with store._fs.open(f"{store._root}/1/{file.name}", "wb") as target:
        target.write(b"bad")
    with pytest.raises(TrackwayError) as raised:
        store.fetch(1, tmp_path / "cache")
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT
    assert raised.value.detail["expected"] == file.sha256
    assert not (tmp_path / "cache" / "1").exists()


def test_a_missing_file_is_refused_by_name(store: WeightStore, source: Path, tmp_path: Path) -> None:
    store.publish(1, "run-a", source, ANY_PROOF)
    store._fs.rm(f"{store._root}/1/model.safetensors")
    with pytest.raises(TrackwayError, match=r"model\.safetensors of weights version 1: .* got no file"):
        store.fetch(1, tmp_path / "cache")


def test_a_version_that_was_never_published_is_not_found(store: WeightStore, tmp_path: Path) -> None:
    with pytest.raises(TrackwayError) as raised:
        store.fetch(4, tmp_path)
    assert raised.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("dies_at", ["manifest.json", "latest.json"])
def test_a_publisher_that_dies_leaves_the_old_version_and_can_publish_again(
    store: WeightStore, source: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str, tmp_path: Path
) -> None:
    store.publish(1, "run-a", source, ANY_PROOF)
    replace = WeightStore._replace

    def dying(self: WeightStore, path: str, content: module.BaseModel) -> None:
        if path.endswith(dies_at):
            raise KeyboardInterrupt
        replace(self, path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WeightStore, "_replace", dying)
        store.publish(2, "run-a", change(source, b"lost"), ANY_PROOF)
    latest = store.latest()
    assert latest is not None and latest.version == 1
    store.publish(2, "run-a", change(source, b"recomputed"), ANY_PROOF)
    assert (store.fetch(2, tmp_path / "cache") / "model.safetensors").read_bytes() == b"recomputed"


def test_latest_json_of_a_folder_is_replaced_not_rewritten(source: Path, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    store.publish(1, "run-a", source, ANY_PROOF)
    with (tmp_path / "store" / "latest.json").open() as reader:
        store.publish(2, "run-a", change(source, b"two"), ANY_PROOF)
        assert reader.read() == '{\n  "version": 1,\n  "run": "run-a",\n  "path": "1"\n}'
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["1", "2", "latest.json"]


def test_a_folder_is_verified_in_place_without_a_copy(source: Path, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    store.publish(1, "run-a", source, ANY_PROOF)
    assert store.fetch(1, tmp_path / "cache") == tmp_path / "store" / "1"
    assert not (tmp_path / "cache").exists()


def test_pruning_keeps_the_newest_and_what_is_being_published(store: WeightStore, source: Path) -> None:
    for version in range(1, 6):
        store.publish(version, "run-a", change(source, bytes([version])), ANY_PROOF)
    store._fs.makedirs(f"{store._root}/9", exist_ok=True)
    store._fs.pipe_file(f"{store._root}/9/model.safetensors", b"unfinished")
    assert store.prune(keep=2) == [1, 2, 3]
    assert store.versions() == [4, 5, 9]


def test_pruning_leaves_a_version_that_is_being_published_first(store: WeightStore) -> None:
    store._fs.makedirs(f"{store._root}/1", exist_ok=True)
    store._fs.pipe_file(f"{store._root}/1/model.safetensors", b"unfinished")
    assert (store.prune(keep=1), store.versions()) == ([], [1])


def test_pruning_to_nothing_is_refused_and_to_the_latest_version_is_not(store: WeightStore, source: Path) -> None:
    for version in (1, 2):
        store.publish(version, "run-a", source, ANY_PROOF)
    with pytest.raises(ValueError, match=r"expected keep >= 1 .*, got 0"):
        store.prune(keep=0)
    assert (store.prune(keep=1), store.versions()) == ([1], [2])


def test_a_folder_is_claimed_by_a_lock_and_any_other_storage_by_a_lease(tmp_path: Path) -> None:
    for url, kind in ((str(tmp_path), FlockPublisherLock), (f"memory://{tmp_path.name}", LeasePublisherLock)):
        with contextlib.closing(WeightStore(url).claim("run-a")) as claim:
            assert type(claim) is kind


def test_only_the_files_of_a_folder_are_published_and_no_manifest(store: WeightStore, source: Path) -> None:
    (source / "manifest.json").write_bytes(b"of another version")
    (source / "checkpoints").mkdir()
    assert [file.name for file in store.publish(1, "run-a", source, ANY_PROOF).files] == [
        "config.json",
        "model.safetensors",
    ]


def test_a_copy_in_the_cache_is_verified_and_not_fetched_again(source: Path, tmp_path: Path) -> None:
    store = WeightStore(f"memory://{tmp_path.name}")
    store.publish(1, "run-a", source, ANY_PROOF)
    folder = store.fetch(1, tmp_path / "cache")
    store._fs.rm(f"{store._root}/1/model.safetensors")

    assert store.fetch(1, tmp_path / "cache") == folder == tmp_path / "cache" / "1"
    assert [path.name for path in (tmp_path / "cache").glob("[!.]*")] == ["1"]
    (folder / "model.safetensors").write_bytes(b"bad")
    with pytest.raises(TrackwayError, match="expected sha256"):
        store.fetch(1, tmp_path / "cache")


@pytest.mark.parametrize(("name", "version"), [("7", 7), (".7.5f0e", 7), ("notes", None), (".x.7", None)])
def test_a_folder_of_a_cache_is_known_by_its_name(name: str, version: int | None) -> None:
    assert version_of(Path("cache") / name) == version


def test_an_empty_folder_cannot_be_published(store: WeightStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got an empty folder"):
        store.publish(1, "run-a", tmp_path, ANY_PROOF)


def test_a_leftover_of_a_publisher_that_died_is_not_mixed_into_the_version(store: WeightStore, source: Path) -> None:
    store._fs.makedirs(f"{store._root}/1", exist_ok=True)
    store._fs.pipe_file(f"{store._root}/1/model-00002-of-00002.safetensors", b"old shard")
    store.publish(1, "run-a", source, ANY_PROOF)
    names = sorted(path.rsplit("/", 1)[-1] for path in store._fs.ls(f"{store._root}/1", detail=False))
    assert names == ["config.json", "manifest.json", "model.safetensors"]


def test_a_full_disk_leaves_readers_at_the_old_version_and_room_for_others(
    small_disk: Path, source: Path, tmp_path: Path
) -> None:
    store = WeightStore(str(small_disk / "store"))
    store.publish(1, "run-a", source, ANY_PROOF)
    with pytest.raises(TrackwayError, match="expected to write the 2000002 bytes of weights version 2 to") as raised:
        store.publish(2, "run-a", change(source, b"x" * 2_000_000), ANY_PROOF)
    assert (raised.value.code, raised.value.status) == (ErrorCode.DISK_FULL, 507)
    latest = store.latest()
    assert latest is not None and latest.version == 1
    assert store.versions() == [1]
    assert store.publish(2, "run-a", change(source, b"smaller"), ANY_PROOF).version == 2


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.ENOSPC, ErrorCode.DISK_FULL, "free space there, or keep fewer versions (trackway.keep_weights)"),
        (errno.EROFS, ErrorCode.NOT_WRITABLE, "make the folder writable for this user, or give another one"),
    ],
)
def test_a_version_that_cannot_be_written_is_removed_and_the_error_says_what_helps(
    store: WeightStore, source: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: ErrorCode, remedy: str
) -> None:
    store.publish(1, "run-a", source, ANY_PROOF)
    put_file = store._fs.put_file

    def fails(local: str, remote: str) -> None:
        if local.endswith("model.safetensors"):
            raise OSError(number, os.strerror(number))
        put_file(local, remote)

    monkeypatch.setattr(store._fs, "put_file", fails)
    with pytest.raises(TrackwayError) as caught:
        store.publish(2, "run-a", source, ANY_PROOF)

    assert (caught.value.code, store.versions()) == (code, [1])
    if not store.is_folder:
        assert caught.value.detail == {"version": 2, "bytes": 5}
        remedy = "free space or grant write access"
        assert caught.value.message.startswith(f"expected to write the 5 bytes of weights version 2 to {store.url}, ")
    assert caught.value.message.endswith(f"; {remedy}")


def test_an_error_of_the_storage_that_is_neither_full_nor_closed_is_raised_as_it_is(
    store: WeightStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(local: str, remote: str) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    monkeypatch.setattr(store._fs, "put_file", fails)
    with pytest.raises(ConnectionResetError):
        store.publish(1, "run-a", source, ANY_PROOF)


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, TrackwayError), (errno.ECONNRESET, ConnectionResetError)])
def test_a_copy_that_cannot_be_written_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    store = WeightStore(f"memory://{tmp_path.name}")
    store.publish(1, "run-a", source, ANY_PROOF)

    def fails(remote: str, local: str) -> None:
        Path(local).write_bytes(b"a part")
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, pytest.raises(error) as caught:
        patch.setattr(store._fs, "get_file", fails)
        store.fetch(1, tmp_path / "cache")

    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    if isinstance(caught.value, TrackwayError):
        assert caught.value.code is ErrorCode.DISK_FULL
        assert caught.value.message.startswith(f"expected to write weights version 1 to {tmp_path}/cache/1, got 'No s")


def test_of_several_fields_that_cannot_be_read_the_first_is_named(store: WeightStore, source: Path) -> None:
    store.publish(1, "run-a", source, ANY_PROOF)
    path = f"{store._root}/1/manifest.json"
    store._fs.pipe_file(path, json.dumps({"version": -1, "run": None, "files": []}).encode())
    with pytest.raises(TrackwayError) as caught:
        store.manifest(1)
    assert caught.value.message == (
        f"expected {path} to be readable, got version: Input should be greater than or equal to 0; "
        "publish a new version"
    )


@pytest.mark.parametrize("content", [b"", b"null", b"\xff", b'{"version": 1, "run": "a", "files": []'])
def test_a_store_whose_files_cannot_be_read_says_which_and_what_to_do(
    store: WeightStore, source: Path, content: bytes
) -> None:
    store.publish(1, "run-a", source, ANY_PROOF)
    fs, root = fsspec.core.url_to_fs(store.url)
    for name in ("latest.json", "1/manifest.json"):
        fs.pipe_file(f"{root}/{name}", content)

    with pytest.raises(TrackwayError, match=r"latest\.json to be readable, got its JSON: .* remove it") as latest:
        store.latest()
    with pytest.raises(TrackwayError, match=r"1/manifest\.json to be readable, .*publish a new version") as manifest:
        store.manifest(1)
    assert {latest.value.code, manifest.value.code} == {ErrorCode.WEIGHTS_CORRUPT}


def test_a_publisher_removes_what_a_killed_one_left_of_a_file(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "store"
    store = WeightStore(str(folder))
    store.publish(1, "r", source, ANY_PROOF)
    drafts = [folder / ".latest.json.0123456789ab.tmp", folder / "1" / ".manifest.json.ba9876543210.tmp"]
    for draft in drafts:
        draft.touch()
        os.utime(draft, (0, 0))

    store.claim("r").close()

    assert [draft.exists() for draft in drafts] == [False, False]
    assert (folder / "latest.json").exists() and (folder / "1" / "manifest.json").exists()


def words(changed: int) -> bytes:
    """1,000 words of which the first ones are changed."""
    return b"xy" * changed + b"ab" * (1000 - changed)


def publish_deltas(store: WeightStore, source: Path, changed: list[int], with_more: int = 0) -> None:
    """Version 1 whole, and for each further number a delta against the version before. One version has a file more."""
    base: WholeWeights | None = None
    for version, count in enumerate(changed, start=1):
        folder = source.with_name(f"whole-{version}")
        folder.mkdir()
        for name in ("added.json", "config.json") if version == with_more else ("config.json",):
            (folder / name).write_bytes(b"{}")
        (folder / "model.safetensors").write_bytes(words(count))
        base = WholeWeights(store.publish(version, "run-a", folder, ANY_PROOF, base=base), folder)


def weights_in(folder: Path) -> bytes:
    assert sorted(path.name for path in folder.glob("[!m]*")) == ["config.json"]
    return (folder / "model.safetensors").read_bytes()


def names_of(store: WeightStore, version: int) -> list[str]:
    return sorted(path.rsplit("/", 1)[-1] for path in store._fs.ls(f"{store._root}/{version}", detail=False))


def test_a_delta_holds_the_changes_alone_and_its_manifest_the_whole_files(store: WeightStore, source: Path) -> None:
    publish_deltas(store, source, [0, 5])

    manifest = store.manifest(2)

    assert names_of(store, 2) == ["manifest.json", "model.safetensors.delta"]
    assert [(file.name, file.size) for file in manifest.files] == [("config.json", 2), ("model.safetensors", 2000)]
    assert manifest.delta is not None
    assert (manifest.delta.base, manifest.delta.encoding) == (1, "words16")
    assert [file.name for file in manifest.delta.files] == ["model.safetensors.delta"]
    assert sum(file.size for file in manifest.delta.files) < 120


def test_a_version_that_changes_much_is_published_whole(store: WeightStore, source: Path) -> None:
    publish_deltas(store, source, [0, 900])

    assert store.manifest(2).delta is None
    assert names_of(store, 2) == ["config.json", "manifest.json", "model.safetensors"]


@pytest.mark.parametrize(("content", "unchanged"), [(b"ab", []), (b"abc", ["config.json"])])
def test_a_delta_takes_at_most_half_the_bytes_and_may_have_whole_files(
    store: WeightStore, source: Path, tmp_path: Path, content: bytes, unchanged: list[str]
) -> None:
    before = tmp_path / "before"
    shutil.copytree(source, before)
    base = WholeWeights(store.publish(1, "run-a", source, ANY_PROOF), before)

    manifest = store.publish(2, "run-a", change(source, content), ANY_PROOF, base=base)

    assert (manifest.delta is None) == bool(unchanged)
    assert names_of(store, 2) == [*unchanged, "manifest.json", "model.safetensors"]
    assert weights_in(store.fetch(2, tmp_path / "cache")) == content


def test_a_file_of_a_version_in_between_is_not_in_the_later_one(
    store: WeightStore, source: Path, tmp_path: Path
) -> None:
    publish_deltas(store, source, [0, 5, 9], with_more=2)

    assert names_of(store, 2) == ["added.json", "manifest.json", "model.safetensors.delta"]
    assert weights_in(store.fetch(3, tmp_path / "cache")) == words(9)


def test_a_late_reader_takes_the_anchor_and_the_deltas_since(store: WeightStore, source: Path, tmp_path: Path) -> None:
    publish_deltas(store, source, [0, 5, 9, 2])

    assert weights_in(store.fetch(4, tmp_path / "cache")) == words(2)


def test_a_reader_with_the_version_before_reads_one_delta(store: WeightStore, source: Path, tmp_path: Path) -> None:
    publish_deltas(store, source, [0, 5, 9])
    store.fetch(2, tmp_path / "cache")
    before = store.fetched_bytes

    assert weights_in(store.fetch(3, tmp_path / "cache")) == words(9)

    delta = store.manifest(3).delta
    assert delta is not None
    assert store.fetched_bytes - before == sum(file.size for file in delta.files)
    assert store.fallbacks == 0


def test_replicas_of_a_host_share_one_copy(store: WeightStore, source: Path, tmp_path: Path) -> None:
    publish_deltas(store, source, [0, 5])
    stores = [store, WeightStore(store.url)]
    with ThreadPoolExecutor() as pool:
        folders = list(pool.map(lambda reader: reader.fetch(2, tmp_path / "cache"), stores))

    assert folders == [tmp_path / "cache" / "2"] * 2
    assert sorted(reader.fetched_bytes > 0 for reader in stores) == [False, True]


def test_who_waits_a_minute_for_another_replica_is_told_to_try_again(
    store: WeightStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_deltas(store, source, [0, 5])
    waits: list[float] = []

    def at_once(path: Path, wait_s: float) -> AbstractContextManager[None]:
        waits.append(wait_s)
        return locked(path)

    monkeypatch.setattr(module, "locked", at_once)
    with locked(tmp_path / "cache" / ".lock"), pytest.raises(LockTaken):
        store.fetch(2, tmp_path / "cache")
    assert waits == [60.0]

    assert weights_in(store.fetch(2, tmp_path / "cache")) == words(5)


@pytest.mark.parametrize("fault", ["other words", "no file"])
def test_a_damaged_copy_is_made_again_from_the_anchor(
    store: WeightStore, source: Path, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish_deltas(store, source, [0, 5, 9])
    copy = store.fetch(2, tmp_path / "cache") / "model.safetensors"
    copy.write_bytes(words(77)) if fault == "other words" else copy.unlink()

    assert weights_in(store.fetch(3, tmp_path / "cache")) == words(9)

    assert store.fallbacks == 1
    assert [record.message.split(":")[0] for record in caplog.records] == [
        f"the copy of weights version 2 in {tmp_path / 'cache'} is damaged and made again"
    ]
    assert weights_in(store.fetch(2, tmp_path / "cache")) == words(5)


@pytest.mark.parametrize("fault", ["damaged", "missing"])
def test_a_delta_that_is_damaged_or_missing_is_refused_by_name_and_the_next_anchor_is_not(
    store: WeightStore, source: Path, tmp_path: Path, fault: str
) -> None:
    publish_deltas(store, source, [0, 5, 9])
    path = f"{store._root}/2/model.safetensors.delta"
    store._fs.pipe_file(path, b"bad") if fault == "damaged" else store._fs.rm(path)

    for version in (2, 3):
        with pytest.raises(TrackwayError, match=r"model\.safetensors\.delta of weights version 2: expected") as raised:
            store.fetch(version, tmp_path / "cache")
        assert (raised.value.code, raised.value.detail["version"]) == (ErrorCode.WEIGHTS_CORRUPT, 2)

    assert (store.anchor_before(3), store.anchor_before(1)) == (1, None)
    store.publish(4, "run-a", source, ANY_PROOF)
    assert (store.fetch(4, tmp_path / "cache") / "model.safetensors").read_bytes() == b"one"


def edit_manifest(store: WeightStore, version: int, old: bytes, new: bytes) -> None:
    path = f"{store._root}/{version}/manifest.json"
    content = store._fs.cat_file(path)
    assert content.count(old) == 1
    store._fs.pipe_file(path, content.replace(old, new))


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", "", "a//b", ".", "a\\b", "a\nb"])
@pytest.mark.parametrize("place", ["whole", "delta"])
def test_a_file_name_that_leaves_the_folder_is_refused(
    store: WeightStore, source: Path, tmp_path: Path, name: str, place: str
) -> None:
    publish_deltas(store, source, [0, 5])
    version, old = (1, "model.safetensors") if place == "whole" else (2, "model.safetensors.delta")
    path = f"{store._root}/{version}/manifest.json"
    manifest = json.loads(store._fs.cat_file(path))
    files = manifest["files"] if place == "whole" else manifest["delta"]["files"]
    next(file for file in files if file["name"] == old)["name"] = name
    store._fs.pipe_file(path, json.dumps(manifest).encode())

    with pytest.raises(TrackwayError, match="expected a path inside the folder, such as model") as raised:
        store.fetch(version, tmp_path / "cache")

    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


def test_a_delta_of_a_later_release_is_refused(store: WeightStore, source: Path, tmp_path: Path) -> None:
    publish_deltas(store, source, [0, 5])
    edit_manifest(store, 2, b"words16", b"later")

    with pytest.raises(TrackwayError, match="expected a delta of weights as words16, got later; update this service"):
        store.fetch(2, tmp_path / "cache")


def test_a_delta_that_names_no_older_base_is_refused(store: WeightStore, source: Path, tmp_path: Path) -> None:
    publish_deltas(store, source, [0, 5, 9, 2])
    edit_manifest(store, 2, b'"base": 1', b'"base": 2')

    with pytest.raises(TrackwayError) as raised:
        store.fetch(4, tmp_path / "cache")

    assert (raised.value.code, raised.value.message) == (
        ErrorCode.WEIGHTS_CORRUPT,
        "expected the manifest of weights version 2 to name an older base, got 2; publish a new version",
    )


@pytest.mark.parametrize(("fault", "removed"), [("no manifest", [1]), ("no older base", [1]), ("unreadable", [])])
def test_pruning_takes_a_base_without_a_manifest_for_the_first_and_keeps_all_where_one_is_unreadable(
    store: WeightStore, source: Path, fault: str, removed: list[int]
) -> None:
    publish_deltas(store, source, [0, 5, 9])
    if fault == "no manifest":
        store._fs.rm(f"{store._root}/2/manifest.json")
    else:
        edit_manifest(store, 2, b'"base": 1', b'"base": 2' if fault == "no older base" else b'"base": -1')

    assert store.prune(keep=1) == removed


def test_pruning_keeps_what_the_kept_versions_are_deltas_of(store: WeightStore, source: Path, tmp_path: Path) -> None:
    store.publish(1, "run-a", source, ANY_PROOF)
    (source / "model.safetensors").write_bytes(words(0))
    base = WholeWeights(store.publish(2, "run-a", source, ANY_PROOF), source)
    for version in (3, 4, 5):
        folder = tmp_path / str(version)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(words(version))
        (folder / "config.json").write_bytes(b"{}")
        base = WholeWeights(store.publish(version, "run-a", folder, ANY_PROOF, base=base), folder)

    assert store.prune(keep=2) == [1]
    assert store.versions() == [2, 3, 4, 5]
    assert weights_in(store.fetch(5, tmp_path / "cache")) == words(5)
    store.publish(6, "run-a", source, ANY_PROOF)
    store.publish(7, "run-a", source, ANY_PROOF)
    assert store.prune(keep=2) == [2, 3, 4, 5]


@pytest.mark.parametrize("dies_at", ["model.safetensors.delta", "manifest.json", "latest.json"])
def test_a_publisher_that_dies_in_a_delta_leaves_the_version_before(
    store: WeightStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    publish_deltas(store, source, [0, 5])
    folder = tmp_path / "whole-2"
    base = WholeWeights(store.manifest(2), folder)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "model.safetensors").write_bytes(words(9))
    (tmp_path / "new" / "config.json").write_bytes(b"{}")
    replace, put_file = WeightStore._replace, store._fs.put_file

    def dying(self: WeightStore, path: str, content: module.BaseModel) -> None:
        if path.endswith(dies_at):
            raise KeyboardInterrupt
        replace(self, path, content)

    def half(local: str, remote: str) -> None:
        if not remote.endswith(dies_at):
            return put_file(local, remote)
        store._fs.pipe_file(remote, Path(local).read_bytes()[:20])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WeightStore, "_replace", dying)
        patch.setattr(store._fs, "put_file", half)
        store.publish(3, "run-a", tmp_path / "new", ANY_PROOF, base=base)

    latest = store.latest()
    assert latest is not None and latest.version == 2
    assert weights_in(store.fetch(2, tmp_path / "cache")) == words(5)
    store.publish(3, "run-a", tmp_path / "new", ANY_PROOF, base=base)
    assert weights_in(store.fetch(3, tmp_path / "cache")) == words(9)
