"""Several nodes on one machine; whoever may not make network namespaces is told why these tests are skipped."""

import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.cluster_runs import stop_all
from tests.cluster.network import unavailable
from tests.cluster.ray_cluster import Cluster, running
from tests.e2e.access_tokens import OPERATOR
from trackway.clients.http_client import TOKEN


@pytest.fixture(scope="module", autouse=True)
def allowed() -> Iterator[None]:
    if reason := unavailable():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(TOKEN, OPERATOR)
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests of a module; where Redis is installed its head may be lost too."""
    with running(tmp_path_factory.mktemp("cluster"), redis=shutil.which("redis-server") is not None) as made:
        yield made


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Complete and without a run, whatever the test before has left."""
    shared.mend()
    stop_all(shared)
    return shared
