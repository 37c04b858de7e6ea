import threading
from pathlib import Path

from tests.waiting import until
from trackway.run_config import RunConfig
from trackway.tracing import TracingSettings
from trackway.trainer.delivery import Leftovers
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.trainer import RunState


def test_its_thread_ends_when_the_service_stops_and_nothing_is_left_to_check(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(RunConfig(), ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="/w"))
    folder.move(RunState.FAILED)
    before = threading.enumerate()
    leftovers = Leftovers(tmp_path, TracingSettings())

    leftovers.offer([folder.info()])
    [thread] = set(threading.enumerate()) - set(before)
    until(lambda: not leftovers._offered)
    leftovers.stop()
    thread.join(60)

    assert not thread.is_alive()
