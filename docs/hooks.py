"""mkdocs' hooks: a link to a file outside docs/, which GitHub shows, becomes a link to a page of the site with that
file. The page shows the file as text without anchors, so a link to a section leads to the top of the page.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?P<file>[^)#\s:]+)(?P<section>#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


def outside(link: str, page: str) -> str | None:
    """Return the linked file from the root of the repository, or None where the link stays inside docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") and not path.endswith(".py") else path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every linked file."""
    found = {
        path
        for page in files.documentation_pages()
        for link in LINK.finditer(page.content_string)
        if (path := outside(link["file"], page.src_uri))
    }
    for path in sorted(found):
        if not (ROOT / path).is_file():
            raise PluginError(f"a page links to {path}, which is no file of the repository; correct the link")
        code = f"`````{LANGUAGES.get(Path(path).suffix, '')}\n{(ROOT / path).read_text(encoding='utf-8')}`````\n"
        content = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n{code}"
        files.append(File.generated(config, f"source/{path}.md", content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at those pages."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def moved(link: re.Match[str]) -> str:
        path = outside(link["file"], here)
        return link[0] if path is None else posixpath.relpath(f"source/{path}.md", posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)
