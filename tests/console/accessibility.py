"""What an automatic check of accessibility finds on the open page: contrast, names, labels, ids, headers."""

from pathlib import Path

from tests.console.browser import Browser

LEAST_CONTRAST, LEAST_CONTRAST_LARGE = 4.5, 3.0
"""Of WCAG 2.2, AA; large is from 24 px on, or 18.66 px if bold."""
_SCRIPT = Path(__file__).with_suffix(".js").read_text()


def faults(browser: Browser) -> list[str]:
    """Faults of the open page; empty for none."""
    code = _SCRIPT.partition("\n")[2]
    return browser.evaluate(f"({code})({LEAST_CONTRAST}, {LEAST_CONTRAST_LARGE})")
