"""Open a page in headless Chromium, in a process of its own, and print observations as JSON.

    python chromium.py REQUEST     {url, views: [{width, height}], dark, script, libraries, screenshots, pdf, record}
                                   -> {ok, requests, console, results: one per view, pdf_bytes}

``script`` is the body of an async function that is run at each view; what it returns is the result. ``libraries`` are
files of JavaScript that are run before. The browser is Chromium, as shipped with Qt's WebEngine. Every request is
recorded before it is made, unless ``record`` is false.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInterceptor,
)
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

_PAINT_DELAY = 600  # milliseconds from layout to painting
_POLL = 50
_WRAPPED = """
window.observed = null;
(async () => {{ {body} }})().then(
    (found) => {{ window.observed = JSON.stringify({{value: found === undefined ? null : found}}); }},
    (error) => {{ window.observed = JSON.stringify({{error: String(error)}}); }});
"""


class _Requests(QWebEngineUrlRequestInterceptor):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info: Any) -> None:
        self.urls.append(info.requestUrl().toString())


class _Page(QWebEnginePage):
    def __init__(self, profile: QWebEngineProfile, record: bool) -> None:
        super().__init__(profile)
        self.console: list[str] = []
        if record:  # by default Qt would block requests of local pages before they can be recorded
            self.settings().setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)

    def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
        self.console.append(f"{level}: {message} ({source}:{line})")


class _Visit:
    """One visit of a page: loads it, then takes the views one after the other."""

    def __init__(self, application: QApplication, request: dict[str, Any]) -> None:
        self._application, self._request = application, request
        self._profile, self._requests = QWebEngineProfile(), _Requests()
        if request.get("record", True):  # Qt does not load the parts of a page in a folder for a listener
            self._profile.setUrlRequestInterceptor(self._requests)
        self._page, self._view = _Page(self._profile, request.get("record", True)), QWebEngineView()
        self._view.setPage(self._page)
        # A phone lays its bar over the page; in pictures it would take 15 pixels of the width.
        shown = not request.get("screenshots")
        self._page.settings().setAttribute(QWebEngineSettings.WebAttribute.ShowScrollBars, shown)
        self._results: list[Any] = []
        self._ok = False
        self._pdf = 0

    def begin(self) -> None:
        self._set_view(self._request["views"][0])
        self._view.show()
        self._page.loadFinished.connect(self._loaded)
        self._page.load(QUrl(self._request["url"]))

    def observations(self) -> dict[str, Any]:
        return {
            "ok": self._ok,
            "results": self._results,
            "requests": self._requests.urls,
            "console": self._page.console,
            "pdf_bytes": self._pdf,
        }

    def _set_view(self, view: dict[str, Any]) -> None:
        self._view.resize(view["width"], view["height"])

    def _loaded(self, ok: bool) -> None:
        self._ok = ok
        for library in self._request.get("libraries", []):
            self._page.runJavaScript(Path(library).read_text(encoding="utf-8"))
        QTimer.singleShot(_PAINT_DELAY, self._run)

    def _run(self) -> None:
        self._page.runJavaScript(_WRAPPED.format(body=self._request.get("script", "")))
        self._poll()

    def _poll(self) -> None:
        QTimer.singleShot(_POLL, lambda: self._page.runJavaScript("window.observed", self._on_result))

    def _on_result(self, found: Any) -> None:
        if not isinstance(found, str) or not found:
            self._poll()
            return
        self._results.append(json.loads(found))
        number = len(self._results)
        if number <= len(self._request.get("screenshots", [])):
            self._view.grab().save(self._request["screenshots"][number - 1])
        if number < len(self._request["views"]):
            self._set_view(self._request["views"][number])
            QTimer.singleShot(_PAINT_DELAY, self._run)
        elif self._request.get("pdf"):
            self._page.printToPdf(self._on_pdf)
        else:
            self._application.quit()

    def _on_pdf(self, data: Any) -> None:
        self._pdf = len(bytes(data)) if bytes(data[:4]) == b"%PDF" else 0
        self._application.quit()


def main() -> None:
    """Visit the page that the first argument describes as JSON; print what was seen."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    request = json.loads(sys.argv[1])
    scheme = " --blink-settings=preferredColorScheme=0" if request["dark"] else ""
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = f"--disable-gpu{scheme}"
    os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # the sandbox needs privileges; the page is trusted
    application = QApplication([])
    visit = _Visit(application, request)
    visit.begin()
    application.exec()
    print(json.dumps(visit.observations()))
    sys.stdout.flush()
    os._exit(0)  # skips Qt's warnings about the order of destruction


if __name__ == "__main__":
    main()
