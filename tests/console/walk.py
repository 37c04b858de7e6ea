"""A walk through every view of the page over one run."""

import json
from urllib.parse import urlencode

from tests.console.browser import Browser
from trackway.wire.trajectory import Tags


def walk(browser: Browser, url: str, run: str, first: Tags, last: Tags) -> dict[str, str]:
    """What each view says; `first` and `last` are two trajectories of the run, for what shows some."""
    place = {"run": run, "step": first.step, "sample": first.sample_index, "rollout": first.rollout_n}
    compared = ",".join(f"{tags.step}/{tags.sample_index}/{tags.rollout_n}" for tags in (first, last))
    views = {
        "runs": {},
        "run": {"run": run},
        "step": {"run": run, "step": first.step},
        "trajectory": place,
        "tokens": place,
        "search": {"run": run, "first_step": first.step},
        "prompt": {"run": run, "sample": first.sample_index},
        "compare": {"run": run, "of": compared},
        "failures": {"run": run},
        "config": {"run": run},
        "system": {},
        "try": {},
    }
    said = {}
    for view, parameters in views.items():
        browser.open(f"{url}#/{view}?{urlencode(parameters)}")
        if view == "search":
            browser.wait("!/ …$|^$/.test(document.querySelector('#main [role=status]').innerText)")
        assert browser.evaluate("!document.querySelector('.problem, .note.bad:not([hidden])')"), (view, browser.text())
        said[view] = browser.text()
    foreign = [address for address in browser.requests if not address.startswith((url, "data:"))]
    assert (foreign, browser.problems) == ([], []), json.dumps(said)
    return said
