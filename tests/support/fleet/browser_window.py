"""A process with one empty window of a real Chromium (Qt's), invisible, to be driven from outside.

`python browser_window.py PORT` obeys the DevTools protocol at that port until it is killed.
"""

import os
import sys

MISSING = 77  # the exit status when there is no browser


def main() -> int:
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QTWEBENGINE_REMOTE_DEBUGGING"] = f"127.0.0.1:{sys.argv[1]}"
    # There is no display, and as root no sandbox; it only ever loads our own page.
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = (
        "--no-sandbox --disable-gpu --disable-dev-shm-usage --remote-allow-origins=*"
    )
    # After the environment is set: they read it when they are loaded.
    try:
        from PySide6.QtCore import QUrl
        from PySide6.QtWebEngineWidgets import QWebEngineView
        from PySide6.QtWidgets import QApplication
    except ImportError as error:  # also for a library of the system that is not there
        sys.stdout.write(f"{error}\n")
        return MISSING
    application = QApplication(sys.argv[:1])
    window = QWebEngineView()
    window.resize(1280, 900)
    window.setUrl(QUrl("about:blank"))
    window.show()
    return application.exec()


if __name__ == "__main__":
    sys.exit(main())
