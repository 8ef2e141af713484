"""Where the suite keeps its state in pytest's config."""

from __future__ import annotations

from typing import Any

import pytest

from shapes.selection import Selection

SELECTION = pytest.StashKey[Selection]()
RESULTS = pytest.StashKey[dict[str, Any]]()  # what a results file is made of, as it comes
