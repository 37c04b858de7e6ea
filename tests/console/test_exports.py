"""Each button that saves a file, and what is in it."""

import io
from pathlib import Path

import pytest
from PIL import Image

from tests.console.browser import Browser
from tests.console.conftest import Serve
from tests.console.example_run import write_run

pytestmark = [pytest.mark.slow, pytest.mark.program("chromium")]

PLACE = "run=tidy&step=2&sample=7&rollout=1"


@pytest.mark.parametrize(
    ("view", "name", "lines", "first"),
    [
        ("runs", "runs.csv", 2, "run,state,step,total_steps,reward,accuracy,failed,seconds,tokens,gpu_seconds"),
        (
            f"tokens?{PLACE}",
            "tidy-2-7-1-tokens.csv",
            8,
            "place,id,text,mask,logprob,version,learner_logprob,entropy,advantage,clipped,kept",
        ),
        (
            "search?run=tidy&text=42&validation=false&last_step=2",
            "tidy-hits.csv",
            9,
            "step,validation,sample_index,rollout_n,score,stop_reason,error,tools,found",
        ),
        (
            "prompt?run=tidy&sample=7",
            "tidy-sample-7.csv",
            5,
            "step,rollout,score,is_baseline,stop_reason,error,seconds,answer",
        ),
        (
            "failures?run=tidy",
            "tidy-failures.csv",
            4,
            "kind,code,tool,service,infrastructure,count,rollouts,validation,message",
        ),
        (
            "step?run=tidy&step=2",
            "tidy-step-2.csv",
            5,
            "step,validation,sample_index,rollout_n,score,stop_reason,error,",
        ),
        ("step?run=tidy&step=2", "tidy-step-2.jsonl", 4, '{"id":'),
        ("compare?run=tidy&of=1/7/0,2/7/1,2/10/0", "tidy-compared.jsonl", 3, '{"id":'),
    ],
)
def test_a_button_saves_what_its_page_shows(
    browser: Browser, url: str, tmp_path: Path, view: str, name: str, lines: int, first: str
) -> None:
    browser.open(f"{url}#/{view}")
    found = saved(browser, tmp_path, name).decode().splitlines()

    assert (len(found), found[0][: len(first)]) == (lines, first)
    assert browser.problems == []


def test_the_replicas_of_the_services_are_saved(browser: Browser, tmp_path: Path, serve: Serve) -> None:
    write_run(tmp_path / "outputs")
    browser.open(f"{serve(tmp_path / 'outputs', services={'tools': 'http://127.0.0.1:9'})}#/system")

    rows = saved(browser, tmp_path, "replicas.csv").decode()
    assert rows == ("service,replica,pid,ready,reason,version,latest,spans_ended,spans_waiting,spans_lost,threads\n")


def test_a_histogram_and_a_grid_are_saved_as_pictures(browser: Browser, url: str, tmp_path: Path) -> None:
    browser.open(f"{url}#/step?run=tidy&step=2")
    for panel, shown, name in ((".rewards", ".histogram", "rewards"), (".rollouts", ".groups", "tidy-step-2-rollouts")):
        picture = saved(browser, tmp_path, f"{name}.png", f"{panel} button[title='save a picture of it']")
        width, height = (int.from_bytes(picture[start : start + 4]) for start in (16, 20))
        box = f"(({{width, height}}) => [width, height])(document.querySelector('{shown}').getBoundingClientRect())"
        assert picture.startswith(b"\x89PNG") and [width, height] == [int(2 * side) for side in browser.evaluate(box)]
        with Image.open(io.BytesIO(picture)) as image:
            assert len(image.getcolors(1 << 20) or []) > 3  # background, boxes and texts
            if shown == ".groups":
                assert large_colours(image, browser, ".cell.error") == {(251, 233, 221), (240, 242, 239)}  # its stripes
                assert len(large_colours(image, browser, ".cell:not(.error)")) == 1
    assert browser.problems == []


def large_colours(image: Image.Image, browser: Browser, cell: str) -> set[tuple[int, ...]]:
    """Colours of at least a tenth of a cell's pixels in the picture of a grid."""
    left, top, right, bottom = browser.evaluate(f"""(() => {{
      const box = (name) => document.querySelector(name).getBoundingClientRect();
      const [at, whole] = [box('.rollouts {cell}'), box('.groups')];
      return [at.left - whole.left, at.top - whole.top, at.right - whole.left, at.bottom - whole.top];
    }})()""")
    part = image.convert("RGB").crop((round(2 * left), round(2 * top), round(2 * right), round(2 * bottom)))
    counts = part.getcolors(1 << 20) or []
    return {colour for count, colour in counts if isinstance(colour, tuple) and count >= part.width * part.height / 10}


def saved(browser: Browser, folder: Path, name: str, selector: str = "") -> bytes:
    """Press the button that saves a file of this name, and read the file."""
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.click(selector or f"button[title='save {name}']")
    browser.until(lambda: (folder / name).is_file())
    return (folder / name).read_bytes()
