"""Several nodes on one machine; whoever may not make network namespaces is told why these tests are skipped."""

from collections.abc import Iterator

import pytest
from access_tokens import OPERATOR
from network import unavailable

from trackway.clients.token import TOKEN


@pytest.fixture(scope="package", autouse=True)
def allowed() -> Iterator[None]:
    if reason := unavailable():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(TOKEN, OPERATOR)
        yield
