"""What axe finds on the open page: its rules of WCAG 2.2 A and AA, and its best practices."""

from importlib.util import find_spec
from pathlib import Path

from tests.console.browser import Browser

SERIOUS = ("serious", "critical")
"""axe's upper two of four impacts."""
_PACKAGE = find_spec("axe_playwright_python")
"""Of `axe.txt`; its own code, which needs Playwright, is not imported."""


def faults(browser: Browser, impacts: tuple[str, ...] = SERIOUS) -> list[str]:
    """Each fault with its impact and the first element that has it; empty for none."""
    assert _PACKAGE is not None and _PACKAGE.origin is not None, "expected what tests/console/axe.txt names; run `make`"
    if not browser.evaluate("typeof axe === 'object'"):
        browser.evaluate((Path(_PACKAGE.origin).parent / "axe.min.js").read_text() + "; true")
    found = browser.evaluate("axe.run(document, {resultTypes: ['violations']}).then((results) => results.violations)")
    return [
        f"{rule['impact']}: {rule['id']} at {rule['nodes'][0]['html'][:200]}"
        for rule in found
        if rule["impact"] in impacts
    ]
