"""The page of a comparison: whole in one file, each text as it is, and nothing in it may act."""

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest

from tests.traces.example_trace import ExampleTrace, chat, span
from trackway.system.process import UserError
from trackway.traces import page
from trackway.traces.compare import compare

HOSTILE = (
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">&lt;#### 7 \x1b[31m</pre>"
)
SEEN = HOSTILE.replace("\x1b", "␛")


class Elements(HTMLParser):
    """Tags, attributes and texts of a page, as a browser's parser sees them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.preformatted: list[str] = []
        self.open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "pre":
            self.preformatted.append("")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.preformatted[-1] += data


def written(*examples: ExampleTrace) -> str:
    return page.render(compare([example.tree() for example in examples]))


@pytest.fixture
def hostile() -> ExampleTrace:
    """A trajectory that tries to take the page over wherever a text of its own can stand."""
    example = ExampleTrace(
        call=HOSTILE, answer=HOSTILE, arguments={HOSTILE: HOSTILE}, result=HOSTILE, feedback={"fate": HOSTILE}
    )
    example.tags[HOSTILE] = HOSTILE
    example["x0"].name = f"execute_tool {HOSTILE}"
    example["r"].inputs = {"messages": [{"role": HOSTILE, "content": HOSTILE}]}
    example["s"].outputs = {HOSTILE: HOSTILE}
    example["t1"].status, example["t1"].error = "ERROR", HOSTILE
    return example


def test_a_hostile_text_is_seen_and_never_becomes_a_part_of_the_page(hostile: ExampleTrace) -> None:
    for source in (written(hostile, ExampleTrace()), written(ExampleTrace(), hostile), written(hostile, hostile)):
        found = Elements(source)
        assert {"script", "img"}.isdisjoint(found.tags)
        assert not any(name.startswith("on") for name, _ in found.attributes)
        assert sum(SEEN in text for text in found.preformatted) >= 3
        assert "\x1b" not in source


def test_the_page_loads_nothing() -> None:
    source = written(ExampleTrace(), ExampleTrace(answer="#### 48"))
    found = Elements(source)
    assert {"script", "link", "img", "iframe", "object", "base", "form"}.isdisjoint(found.tags)
    assert not re.search(r"https?:|//|@import|url\(", source)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    assert [value for name, value in found.attributes if name in ("src", "href")] == ["#turns"]


def test_what_only_one_side_has_is_marked_on_its_side() -> None:
    source = written(ExampleTrace(), ExampleTrace(answer="#### 48"))
    assert "<pre>#### <del>54</del></pre>" in source and "<pre>#### <ins>48</ins></pre>" in source


def test_a_line_break_that_only_one_side_has_can_be_seen() -> None:
    assert "<pre>a<del>↵\nb</del></pre>" in written(ExampleTrace(answer="a\nb"), ExampleTrace(answer="a"))


def test_turns_that_one_side_lacks_say_so() -> None:
    longer = ExampleTrace()
    longer.spans += [span("t2", "r", "turn 2", "agent", 371, 379), chat("c2", "t2", 372, "one more", 60, 2)]
    source = written(ExampleTrace(), longer)
    assert source.count("no such turn") == 1 and "<pre><ins>one more</ins></pre>" in source
    without = ExampleTrace()
    without.drop("x0")
    assert written(ExampleTrace(), without).count("no such call") == 1


def test_a_group_stands_side_by_side() -> None:
    shorter = ExampleTrace(rollout_n=2, reward=0.0)
    shorter.drop("t1", "c1")
    source = written(ExampleTrace(rollout_n=0), ExampleTrace(rollout_n=1, answer="#### 48"), shorter)
    assert "<title>3 trajectories compared</title>" in source and 'style="--count: 3; ' in source
    assert '<th scope="row">rollout_n</th><td>0</td><td>1</td><td>2</td>' in source
    assert re.search(r'>reward</th><td>([^<]+)</td><td class="as-first">\1</td><td>0</td>', source)
    assert "<pre>#### <del>54</del></pre>" in source and "<pre>#### <ins>48</ins></pre>" in source
    assert source.count("no such turn") == 1 and source.count('<span class="letter B">C</span>') == 5


def test_facts_that_differ_stand_in_the_table_and_the_others_below_it() -> None:
    source = written(ExampleTrace(), ExampleTrace(step=10))
    assert '<th scope="row">step</th><td>3</td><td>10</td>' in source
    assert '<span class="fact"><span>rollout_n</span> 2</span>' in source


def test_a_file_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--html: cannot write .*: No such file or directory"):
        page.write(tmp_path / "nowhere" / "page.html", compare([ExampleTrace().tree(), ExampleTrace().tree()]))


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
]


class Browser:
    """A headless Chromium that opens one file and ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, file: Path, *flags: str) -> str:
        """What it writes on its standard output."""
        profile = self._folder / f"profile-{len(os.listdir(self._folder))}"
        command = ["chromium", *FLAGS, f"--user-data-dir={profile}", *flags, file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    def corner(self, file: Path, width: int, scheme: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size of the picture of a page and its colour beside everything; scheme 0 is dark, 1 is light."""
        image = self._folder / "page.png"
        self.open(
            file,
            f"--screenshot={image}",
            f"--window-size={width},900",
            f"--blink-settings=preferredColorScheme={scheme}",
        )
        pixels = matplotlib.image.imread(image)
        return pixels.shape[:2], tuple(round(255 * float(part)) for part in pixels[2, 2][:3])


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path)


@pytest.mark.slow
@pytest.mark.program("chromium")
def test_a_browser_opens_the_page_from_disk_and_no_text_of_a_model_acts_in_it(
    browser: Browser, hostile: ExampleTrace, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    page.write(file, compare([hostile.tree(), ExampleTrace().tree()]))
    dom = browser.open(file, "--dump-dom")
    found = Elements(dom)
    assert "<title>s3/i17/n2 and s3/i17/n2 compared</title>" in dom
    assert {"script", "img"}.isdisjoint(found.tags)
    assert any(SEEN in text for text in found.preformatted) and "#### 54" in found.preformatted
    assert found.tags.count("details") == 5


@pytest.mark.slow
@pytest.mark.program("chromium")
@pytest.mark.parametrize("width", [1280, 700])
def test_the_page_has_a_light_and_a_dark_face(browser: Browser, tmp_path: Path, width: int) -> None:
    file = tmp_path / "page.html"
    page.write(file, compare([ExampleTrace().tree(), ExampleTrace(answer="#### 48").tree()]))
    assert browser.corner(file, width, scheme=1) == ((900, width), (0xF6, 0xF7, 0xF9))
    assert browser.corner(file, width, scheme=0) == ((900, width), (0x14, 0x17, 0x1C))
