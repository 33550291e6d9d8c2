"""``python -m tplora``."""

from tplora.cli import main

main()
