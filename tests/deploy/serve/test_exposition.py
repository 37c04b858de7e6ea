"""What a replica whose metrics fail gives the others."""

import pickle

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from trackway.deploy.graph import Replica
from trackway.reward.settings import RewardSettings

pytestmark = pytest.mark.anyio


async def test_an_error_of_metrics_is_no_metrics_but_an_error_that_can_be_sent_on() -> None:
    replica, app = Replica("reward", RewardSettings()), FastAPI()
    app.add_api_route("/metrics", lambda: JSONResponse({"error": "no"}, status_code=500))
    replica._app = app
    app.state.settings = RewardSettings()

    with pytest.raises(RuntimeError) as caught:
        await replica.exposition()

    assert str(pickle.loads(pickle.dumps(caught.value))) == '/metrics answered 500: {"error":"no"}'
