"""``python -m pulse`` is the command ``pulse``."""

from __future__ import annotations

from pulse.cli import main

if __name__ == "__main__":
    main()
