"""Of the site alone: pages link to examples of the repository, which are no pages, so the site gets them as files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
FILE_LINK = re.compile(r"\]\(\.\./((?:examples|deploy)/[^)#]+\.\w+)\)")
FOLDER_LINK = re.compile(r"\[([^\]]+)\]\(\.\./[\w/-]+\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file that a page links to."""
    pages = [Path(page.abs_src_path or "").read_text() for page in files.documentation_pages()]
    for name in sorted({name for text in pages for name in FILE_LINK.findall(text)}):
        # A file that is not there stays unknown, so that the strict build names the link.
        if (ROOT / name).is_file():
            files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Lead links to these files, and none to folders, which a site does not have."""
    return FOLDER_LINK.sub(r"\1", FILE_LINK.sub(r"](\1)", markdown))
