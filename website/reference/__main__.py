"""Write the generated pages to a folder: ``python -m website.reference FOLDER``."""

import sys
from pathlib import Path

from website.reference import PAGES

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    raise SystemExit(__doc__)
for path, page in PAGES.items():
    target = Path(sys.argv[1]) / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(), encoding="utf-8")
