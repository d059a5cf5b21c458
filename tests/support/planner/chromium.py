"""Open an HTML page in a headless browser, in a process of its own, and print observations as JSON.

    python chromium.py PAGE        a file -> {ok, title, table, pictures, pixels, requests, console}

The browser is Chromium, as shipped with Qt's WebEngine. Every request is recorded before it is made.
"""

import json
import os
import sys
from pathlib import Path

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInterceptor,
)
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

_SIZE = (1200, 4000)
_PAINT_DELAY = 1000  # milliseconds from layout to painting
_SCRIPT = """JSON.stringify({
    title: document.title,
    table: document.querySelector("table").rows.length,
    pictures: [...document.querySelectorAll("svg")].map(svg => [...svg.querySelectorAll("[fill^='#']")].map(e => {
        const box = e.getBoundingClientRect();
        return {x: box.x + box.width / 2, y: box.y + box.height / 2, width: box.width, fill: e.getAttribute("fill")};
    })),
})"""


class _Requests(QWebEngineUrlRequestInterceptor):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info) -> None:
        self.urls.append(info.requestUrl().toString())


class _Page(QWebEnginePage):
    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.console: list[str] = []
        # By default Qt would block requests of local pages before they can be recorded.
        self.settings().setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        self.console.append(f"{level}: {message} ({source}:{line})")


def main() -> None:
    """Open the page, run the script in it, read pixels, print the result."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu")
    os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # the sandbox needs privileges; the page is trusted
    application = QApplication([])
    profile, requests = QWebEngineProfile(), _Requests()
    profile.setUrlRequestInterceptor(requests)
    page, view, observed = _Page(profile), QWebEngineView(), {}
    view.setPage(page)
    view.resize(*_SIZE)
    view.show()

    def on_load(ok: bool) -> None:
        observed["ok"] = ok
        page.runJavaScript(_SCRIPT, on_result)

    def on_result(text: str) -> None:
        observed.update(json.loads(text))
        QTimer.singleShot(_PAINT_DELAY, grab_pixels)

    def grab_pixels() -> None:
        picture = view.grab().toImage()
        positions = [shape for shapes in observed["pictures"] for shape in shapes]
        observed["pixels"] = [
            picture.pixelColor(int(position["x"]), int(position["y"])).name() for position in positions
        ]
        application.quit()

    page.loadFinished.connect(on_load)
    page.load(QUrl.fromLocalFile(str(Path(sys.argv[1]).resolve())))
    application.exec()
    print(json.dumps({**observed, "requests": requests.urls, "console": page.console}))
    sys.stdout.flush()
    os._exit(0)  # skips Qt's warnings about the order of destruction


if __name__ == "__main__":
    main()
