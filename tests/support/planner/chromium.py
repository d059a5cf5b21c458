"""Opens a page in a real browser without a screen, as a process of its own, and says what it saw there, as JSON.

    python chromium.py PAGE        PAGE a file: {ok, pictures, table, outside, console, pixels}

The browser is Chromium, as Qt's WebEngine ships it. Every request that it wants to make is noted before it is made.
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
_PAINTED = 1000  # milliseconds until what was laid out has been painted
_QUESTION = """JSON.stringify({
    title: document.title,
    table: document.querySelector("table").rows.length,
    pictures: [...document.querySelectorAll("svg")].map(svg => [...svg.querySelectorAll("[fill^='#']")].map(one => {
        const box = one.getBoundingClientRect();
        return {x: box.x + box.width / 2, y: box.y + box.height / 2, width: box.width, fill: one.getAttribute("fill")};
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
        # Qt would refuse it what a page is refused nowhere else, and nobody would see that it had asked.
        self.settings().setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        self.console.append(f"{level}: {message} ({source}:{line})")


def main() -> None:
    """Open, ask, look, tell."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu")
    os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # it has no root, and the page is ours
    application = QApplication([])
    profile, requests = QWebEngineProfile(), _Requests()
    profile.setUrlRequestInterceptor(requests)
    page, view, seen = _Page(profile), QWebEngineView(), {}
    view.setPage(page)
    view.resize(*_SIZE)
    view.show()

    def loaded(ok: bool) -> None:
        seen["ok"] = ok
        page.runJavaScript(_QUESTION, answered)

    def answered(text: str) -> None:
        seen.update(json.loads(text))
        QTimer.singleShot(_PAINTED, look)

    def look() -> None:
        picture = view.grab().toImage()
        places = [one for shapes in seen["pictures"] for one in shapes]
        seen["pixels"] = [picture.pixelColor(int(one["x"]), int(one["y"])).name() for one in places]
        application.quit()

    page.loadFinished.connect(loaded)
    page.load(QUrl.fromLocalFile(str(Path(sys.argv[1]).resolve())))
    application.exec()
    print(json.dumps({**seen, "requests": requests.urls, "console": page.console}))
    sys.stdout.flush()
    os._exit(0)  # what Qt would say about the order in which its objects go is of no interest


if __name__ == "__main__":
    main()
