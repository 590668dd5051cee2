"""`guide`: the manual. Its pages are the Markdown files of the package's folder guide/, one per topic."""

from importlib import resources

import typer

from k2convert.cli.console import print_markdown, print_next, print_table
from k2convert.cli.verbs import GuideOptions
from k2convert.errors import quoted


def guide(options: GuideOptions) -> None:
    """Show the page of a topic, or list all pages; raises BadParameter for a topic without a page."""
    pages = read_pages()
    topic = options.topic
    if topic is None:
        print_table("pages of the guide", ("topic", "about"), [(t, summary(p)) for t, p in pages.items()], left=(0, 1))
        print_next("k2convert guide TOPIC")
    elif topic in pages:
        print_markdown(pages[topic])
    else:
        raise typer.BadParameter(f"{quoted(topic)} is no topic of the guide. Topics: {', '.join(pages)}.")


def read_pages() -> dict[str, str]:
    """Return the text of every page by its topic, in alphabetical order."""
    files = (resources.files("k2convert") / "guide").iterdir()
    return {
        file.name.removesuffix(".md"): file.read_text(encoding="utf-8") for file in sorted(files, key=lambda f: f.name)
    }


def summary(page: str) -> str:
    """Return the first paragraph of a page, one sentence on one line."""
    return page.split("\n", 3)[2]
