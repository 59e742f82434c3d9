"""Open pages in a headless Chromium."""

import os
import shutil
import subprocess
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def chromium(tmp_path: Path, page: Path, *options: str) -> str:
    assert BROWSER is not None
    usual = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}"]
    usual += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to use a sandbox as root
    usual += ["--enable-logging=stderr", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [BROWSER, *usual, *options, page.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said  # Chromium reports refused scripts and styles here
    return done.stdout
