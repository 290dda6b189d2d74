import pytest

from prefixkit.testing.application.browser import CHROMIUM, Browser


@pytest.fixture(scope="package")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on the path to open the page in")
    one = Browser()
    yield one
    one.close()


@pytest.fixture
def quiet(browser):
    """After the test: no message, no error, no dialog, and nothing asked of a network."""
    yield
    for kind in (
        "Runtime.consoleAPICalled",
        "Runtime.exceptionThrown",
        "Log.entryAdded",
        "Page.javascriptDialogOpening",
    ):
        assert not browser.seen(kind), browser.seen(kind)
    urls = [event["request"]["url"] for event in browser.seen("Network.requestWillBeSent")]
    assert all(url.startswith(("file:", "about:")) for url in urls), urls
