"""One publisher at a time: in a folder by a lock that dies with its holder, elsewhere by a lease of its owner."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from trackway.clients import publisher_lock
from trackway.clients.weights import WeightStore
from trackway.wire.errors import ErrorCode, TrackwayError

HOLD = "import sys; from trackway.clients.weights import WeightStore; c = WeightStore(sys.argv[1]).claim('run a'); "
HOLD += "print('held', flush=True); sys.stdin.read()"


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.stores)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightStore]:
    urls = {"file": str(tmp_path / "store"), "memory": f"memory://{tmp_path.name}"}
    bucket = request.getfixturevalue("object_store") if request.param == "s3" else ""
    yield WeightStore(urls.get(request.param, f"{bucket}/{tmp_path.name}"))
    fsspec.filesystem("memory").store.clear()


def test_the_second_publisher_is_refused_by_the_firsts_name_until_it_lets_go(store: WeightStore) -> None:
    first = store.claim("run a")
    with pytest.raises(TrackwayError, match="got run b besides run a") as raised:
        store.claim("run b")
    assert raised.value.code is ErrorCode.CONFLICT
    first.renew()
    first.close()
    second = store.claim("run b")
    with pytest.raises(TrackwayError, match="got run c besides run b"):
        store.claim("run c")
    second.close()


def test_the_claim_of_a_killed_publisher_is_free(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TrackwayError, match=rf"run a \(process {holder.pid}\)"):
        WeightStore(str(tmp_path)).claim("run b")
    holder.kill()
    holder.wait(60)
    holder.stdin.close()
    holder.stdout.close()
    WeightStore(str(tmp_path)).claim("run b").close()


def test_a_lease_that_ran_out_may_be_taken_and_its_first_holder_notices(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    slow = publisher_lock.LeasePublisherLock(fs, f"/{tmp_path.name}", "run a", lease_s=0.0)
    taken = publisher_lock.LeasePublisherLock(fs, f"/{tmp_path.name}", "run b")
    with pytest.raises(TrackwayError, match="got run a besides run b"):
        slow.renew()
    slow.close()
    with pytest.raises(TrackwayError, match="got run c besides run b"):
        publisher_lock.LeasePublisherLock(fs, f"/{tmp_path.name}", "run c")
    taken.close()


def test_a_resumed_run_takes_its_lease_over_and_its_old_process_may_publish_no_more(tmp_path: Path) -> None:
    store = WeightStore(f"memory://{tmp_path.name}")
    old = store.claim("run a")
    resumed = store.claim("run a")
    with pytest.raises(TrackwayError, match="got run a besides run a, resumed since") as raised:
        old.renew()
    assert raised.value.code is ErrorCode.CONFLICT
    old.close()
    resumed.renew()
    with pytest.raises(TrackwayError, match=r"got run b besides run a \(for "):
        store.claim("run b")
    resumed.close()
    with pytest.raises(TrackwayError, match="got run a besides one that removed its lease"):
        old.renew()
    store.claim("run b").close()


def test_a_lost_lease_is_not_taken_back_when_it_runs_out(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    old = publisher_lock.LeasePublisherLock(fs, f"/{tmp_path.name}", "run a")
    resumed = publisher_lock.LeasePublisherLock(fs, f"/{tmp_path.name}", "run a", lease_s=0.0)
    with pytest.raises(TrackwayError, match="resumed since"):
        old.renew()
    resumed.renew()


def test_a_lease_counts_by_the_stores_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = WeightStore(f"memory://{tmp_path.name}"), time.time()
    held = store.claim("run a")
    monkeypatch.setattr("time.time", lambda: now + 7200)
    with pytest.raises(TrackwayError, match=r"got run b besides run a \(for 1800 s more\)"):
        store.claim("run b")
    held.close()
    assert fsspec.filesystem("memory").find(f"/{tmp_path.name}") == []
