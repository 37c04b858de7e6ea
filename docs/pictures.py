"""Makes the pictures of the README and the docs from the last demo: a trajectory and the filter dialog in MLflow, pages
of the console, a comparison (these by headless Chromium), and the reward curve.

make demo && make picture        (Debian: apt-get install chromium chromium-driver)
python docs/pictures.py --outputs my-agent/outputs --own-agent mine        (a run of 20 steps and its two evaluations)
"""

# pyright: reportMissingImports=false
import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

import trackway.traces as traces
from trackway.deploy.commands.traces import store_uri
from trackway.deploy.deployment import processes
from trackway.deploy.local import mlflow_server
from trackway.system import free_port
from trackway.traces.views import reward_of

PICTURES = Path(__file__).parent / "pictures"
WAIT_S = 60
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1500,960",
]


def main() -> None:
    """Copy the curve, photograph a comparison, and a trajectory in an MLflow on the demo's database."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--own-agent", metavar="RUN", help="only the pictures of docs/start/your-own-agent.md")
    arguments = parser.parse_args()
    outputs = arguments.outputs
    PICTURES.mkdir(exist_ok=True)
    if arguments.own_agent is not None:
        return own_agent(outputs, arguments.own_agent)
    shutil.copy(outputs / "reward.png", PICTURES / "reward.png")
    compare(outputs, PICTURES / "compare.png")
    console(outputs)
    port = free_port()
    server = mlflow_server.start(outputs.resolve() / "mlflow" / "mlflow.db", port)
    try:
        photograph(f"http://127.0.0.1:{port}", outputs, PICTURES / "trajectory.png")
        filter_dialog(f"http://127.0.0.1:{port}", outputs, PICTURES / "filter.png")
    finally:
        processes.stop_tree(server)


def compare(outputs: Path, image: Path) -> None:
    """A held-out problem that was answered wrongly before the training, beside the same one after it."""
    words = ["--validate", "--step", "0", "--reward-max", "0", "--limit", "1", "--json"]
    [wrong] = json.loads(trackway(outputs, "list", *words))
    page = Path(tempfile.mkdtemp()) / "compare.html"
    last = json.loads((outputs / "summary.json").read_text())["steps"]
    sample = wrong["tags"]["sample_index"]
    trackway(outputs, "compare", "--validate", "--sample-index", sample, "--steps", f"0,{last}", "--html", str(page))
    with chromium() as browser:
        browser.set_window_size(1280, 1120)
        browser.get(page.as_uri())
        browser.save_screenshot(str(image))
    print(image)


def console(outputs: Path) -> None:
    """The first step in the console, a trajectory of it that was rewarded, and its tokens."""
    [right] = json.loads(trackway(outputs, "list", "--step", "1", "--reward-min", "1", "--limit", "1", "--json"))
    run = next(outputs.glob("*/state.json")).parent.name
    step = f"run={run}&step=1"
    rollout = f"{step}&sample={right['tags']['sample_index']}&rollout={right['tags']['rollout_n']}"
    photograph_views(
        outputs,
        {
            "console-step": (f"#/step?{step}", 1060),
            "console-trajectory": (f"#/trajectory?{rollout}", 1010),
            "console-tokens": (f"#/tokens?{rollout}", 760),
        },
    )


def own_agent(outputs: Path, run: str) -> None:
    """The run of the page about an own agent, and the rows of its evaluations side by side."""
    evaluated = sorted(folder.parent.name for folder in outputs.glob("*/evaluation.json"))[-1]
    views = {"own-agent-run": (f"#/run?run={run}", 880), "own-agent-rows": (f"#/evaluations?run={evaluated}", 700)}
    photograph_views(outputs, views)


def photograph_views(outputs: Path, views: Mapping[str, tuple[str, int]]) -> None:
    """Save the console's pages at these addresses, each as high as it says, as pictures of these names."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = ["console", "--outputs", str(outputs), "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", "trackway.deploy.cli", *words]) as server, chromium() as browser:
        try:
            wait_for_server(browser, url)
            for name, (address, height) in views.items():
                browser.set_window_size(1280, height)
                browser.get(f"{url}/{address}")
                ready = f"return document.getElementById('main').dataset.ready === {json.dumps(address)}"
                WebDriverWait(browser, WAIT_S).until(lambda page, ready=ready: page.execute_script(ready))
                browser.save_screenshot(str(PICTURES / f"{name}.png"))
                print(PICTURES / f"{name}.png")
        finally:
            server.terminate()


def trackway(outputs: Path, *words: str) -> str:
    """What `trackway traces ...` prints."""
    command = [sys.executable, "-m", "trackway.deploy.cli", "traces", *words, "--outputs", str(outputs)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def chromium() -> webdriver.Chrome:
    """A headless browser with a profile of its own."""
    options = Options()
    for flag in [*FLAGS, f"--user-data-dir={tempfile.mkdtemp()}"]:
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or sys.exit("no chromium on PATH; install Debian's chromium")
    return webdriver.Chrome(options, Service(shutil.which("chromedriver")))


def photograph(mlflow_url: str, outputs: Path, image: Path) -> None:
    """Open a rewarded two-turn trajectory of the last step and save what the browser shows."""
    trace_id, experiment_id = a_good_trace(outputs)
    with chromium() as browser:
        wait_for_server(browser, mlflow_url)
        browser.get(f"{mlflow_url}/#/experiments/{experiment_id}/traces?selectedEvaluationId={trace_id}")
        WebDriverWait(browser, WAIT_S).until(lambda page: page.find_elements(By.XPATH, "//*[text()='turn 0']"))
        time.sleep(3)  # the drawer slides in, and nothing on the page says when it has arrived
        dialogs = browser.find_elements(By.CSS_SELECTOR, "[role=dialog]")
        max(dialogs, key=lambda one: one.size["width"] * one.size["height"]).screenshot(str(image))
    print(image)


def filter_dialog(mlflow_url: str, outputs: Path, image: Path) -> None:
    """Fill in MLflow's dialog that filters traces by tag, and save what it shows."""
    _, experiment_id = a_good_trace(outputs)
    with chromium() as browser:
        wait_for_server(browser, mlflow_url)
        browser.get(f"{mlflow_url}/#/experiments/{experiment_id}/traces")

        def part(name: str) -> WebElement:
            selector = f"[data-component-id='web-shared.traces-table.filter.{name}']"
            return WebDriverWait(browser, WAIT_S).until(lambda page: page.find_element(By.CSS_SELECTOR, selector))

        browser.execute_script("arguments[0].click()", part("trigger"))  # a hint of MLflow's may lie over it
        part("field").click()
        [tag] = [option for option in browser.find_elements(By.CSS_SELECTOR, "[role=option]") if option.text == "Tag"]
        tag.click()
        part("key").send_keys("step")
        part("value").send_keys("1")
        part("popover").screenshot(str(image))
    print(image)


def wait_for_server(browser: webdriver.Chrome, url: str, health: str = "/health") -> None:
    """Load the start page as soon as the server answers."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            if httpx.get(f"{url}{health}").status_code == 200:
                return browser.get(url)
        except httpx.TransportError:
            time.sleep(0.5)
    sys.exit(f"nothing answered at {url} within {WAIT_S} s")


def a_good_trace(outputs: Path) -> tuple[str, str]:
    """A training trajectory whose reward is 1, from the newest step."""
    uri = store_uri(outputs)
    [experiment] = traces.experiment_ids(uri, "trackway-demo")
    trees = [*traces.MlflowStore(uri, [experiment]).trees("tags.validate = 'False'")]
    rewarded = [tree for tree in trees if reward_of(tree) == 1.0]
    newest = max(rewarded, key=lambda tree: int(tree.tags["step"]))
    return newest.trace_id, experiment


if __name__ == "__main__":
    main()
