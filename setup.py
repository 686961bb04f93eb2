"""The README as a package index shows it: all else about the package stands in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

# A link to a file of the repository is dead on an index: there the file is named, as the source distribution has it.
setup(
    long_description=re.sub(
        r"\[([^\]]+)\]\((?!\w+:)([^)#\s]+)[^)\s]*\)",
        lambda link: f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`)",
        README,
    ),
    long_description_content_type="text/markdown",
)
