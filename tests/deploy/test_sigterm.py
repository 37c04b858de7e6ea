"""Ray's actor processes of ours end at SIGTERM, whatever handler Ray has set in their main thread."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ACTOR = """
import signal, threading, time
signal.signal(signal.SIGTERM, lambda *_: print("Ray's handler", flush=True))
{imports}
thread = threading.Thread(target=lambda: {work})
thread.start()
thread.join()
print("running", flush=True)
time.sleep(30)
"""
PROXY = ACTOR.format(imports="from trackway.deploy.http_proxy import bound_connections", work="bound_connections()")
REPLICA = ACTOR.format(
    imports="from trackway.deploy.graph import Replica\nfrom trackway.reward.settings import RewardSettings",
    work='Replica("reward", RewardSettings())',
)


@pytest.mark.parametrize("actor", [PROXY, REPLICA], ids=["proxy", "replica"])
def test_sigterm_ends_it_at_once(actor: str):
    with subprocess.Popen([sys.executable, "-c", actor], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=10)

    assert (process.returncode, said) == (-signal.SIGTERM, "")
