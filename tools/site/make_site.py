"""Build the documentation site: `python tools/site/make_site.py [FOLDER]`, by default `site/`.

Sphinx reads a copy of docs/ in build/docs. Added to it are: README.md and CONTRIBUTING.md, a page
for each command (from typer), a page for each public module (from its docstrings), and a page for
each file or folder of the tree that a page links to. After the build every link inside the site is
checked. A broken link, or a page that loads something from the network, fails the build.
"""

import importlib
import inspect
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent

# The public modules. The API reference has one page for each; all other modules are private.
PUBLIC = (
    "attnscope",
    "attnscope.profile",
    "attnscope.bench.workloads",
    "attnscope.bench.impls",
    "attnscope.numerics",
    "attnscope.reference",
    "attnscope.integrations.transformers",
)
# Pages made of files outside docs/, and the title each has in the navigation.
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md"}
NAVIGATION = {
    "Start": ["Overview <overview>", "install"],
    "Guides": ["ops", "benchmarking", "profiling", "nsight", "tuning", "numerics", "timeline"],
    "Kernels": [f"kernels/{n}" for n in ("sm90_forward", "sm80_forward", "sm90_backward")]
    + ["kernels/sm80_backward", "perf-log"],
    "Reports": ["reports/README", *(f"reports/h200/{n}" for n in ("attribution", "lm", "lm-nsys"))]
    + ["reports/h200/pair", "reports/h200/transformers"],
    "Reference": ["commands/index", "api/index"],
    "Project": ["contributing"],
}
LANGUAGES = {".cuh": "cuda", ".cu": "cuda", ".h": "cpp", ".cpp": "cpp", ".py": "python"}
LANGUAGES |= {".yaml": "yaml", ".toml": "toml", "": "text"}
LINK = re.compile(r"(?P<head>\]\()(?P<target>[^()\s]+)(?=[^()]*\))")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
SCHEME = re.compile(r"^[a-z][a-z+.-]*:")


class Site:
    """The folder that Sphinx reads, and the files of the tree that its pages link to."""

    def __init__(self, root: Path, stage: Path) -> None:
        self.root, self.stage = root, stage
        self.linked: set[str] = set()

    def write(self, page: str, text: str) -> None:
        path = self.stage / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def add_page(self, source: str, page: str) -> None:
        """Copy a Markdown file of the tree, its links rewritten for the site."""
        parts = FENCE.split((self.root / source).read_text())
        parts[::2] = [self._rewrite_links(part, source, page) for part in parts[::2]]
        self.write(page, "".join(parts))

    def _rewrite_links(self, text: str, source: str, page: str) -> str:
        def rewrite(match: re.Match[str]) -> str:
            return match["head"] + self.link(match["target"], source, page)

        return LINK.sub(rewrite, text)

    def link(self, target: str, source: str, page: str) -> str:
        """The link in `page` to the file that `target` points to in the file `source`."""
        if SCHEME.match(target) or target.startswith("#"):
            return target
        name, hash_sign, heading = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        if path in PAGES:
            goal = PAGES[path]
        elif path.startswith("docs/"):
            goal = path.removeprefix("docs/")
        elif (self.root / path).is_dir() or Path(path).suffix in LANGUAGES:
            self.linked.add(path)
            goal = source_page(path)
        else:  # data: Sphinx offers it as a download
            goal = f"source/{path}"
            self._copy(self.root / path, goal)
        return posixpath.relpath(goal, posixpath.dirname(page) or ".") + hash_sign + heading

    def _copy(self, file: Path, goal: str) -> None:
        (self.stage / goal).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, self.stage / goal)

    def add_docs(self) -> None:
        """Copy docs/: pages with their links rewritten, figures unchanged."""
        for name in tracked_files(self.root, "docs"):
            if name.endswith(".md"):
                self.add_page(name, name.removeprefix("docs/"))
            elif not name.endswith((".html", ".json")):
                self._copy(self.root / name, name.removeprefix("docs/"))

    def add_sources(self) -> None:
        """Write a page for each linked file; the page of a linked folder lists its files."""
        folders = sorted(path for path in self.linked if (self.root / path).is_dir())
        shown = {path for path in self.linked if path not in folders}
        for folder in folders:
            files = [f for f in tracked_files(self.root, folder) if Path(f).suffix in LANGUAGES]
            shown.update(files)
            page = source_page(folder)
            rows = [f"- [{f}]({posixpath.relpath(source_page(f), 'source')})" for f in files]
            self.write(page, f"---\norphan: true\n---\n\n# {folder}\n\n" + "\n".join(rows) + "\n")
        for file in sorted(shown):
            text = (self.root / file).read_text()
            fence = f"````{{code-block}} {LANGUAGES[Path(file).suffix]}\n:linenos:\n\n{text}````\n"
            self.write(source_page(file), f"---\norphan: true\n---\n\n# {file}\n\n{fence}")


def source_page(path: str) -> str:
    """The page of a file or folder of the tree. All such pages are in one folder."""
    return f"source/{path.replace('/', '-')}.md"


def tracked_files(root: Path, folder: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", folder]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [name for name in sorted(listed.split("\0")) if name and (root / name).is_file()]


def toctree(entries: list[str], caption: str = "", options: str = "") -> str:
    caption = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n{caption}{options}\n" + "\n".join(entries) + "\n```\n"


def add_navigation(site: Site) -> None:
    index = site.stage / "index.md"
    trees = [toctree(entries, part, ":hidden:\n") for part, entries in NAVIGATION.items()]
    index.write_text(index.read_text() + "".join(trees))


def add_commands(site: Site) -> None:
    """Write a page for each command: typer's list of its arguments and options."""
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from attnscope.cli import COMMANDS, build

    rows = ""
    for name in COMMANDS:
        command = get_command(build(name)).commands[name]  # type: ignore[attr-defined]
        context = typer.Context(command, info_name=name)
        text = get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="attnscope")
        site.write(f"commands/{name}.md", text)
        rows += f"- [`attnscope {name}`]({name}.md): {(command.help or '').splitlines()[0]}\n"
    text = (
        f"# Commands\n\nThe help of every command, as `attnscope NAME --help` prints it.\n\n{rows}"
    )
    site.write("commands/index.md", text + toctree(list(COMMANDS), options=":hidden:\n"))


def add_api(site: Site) -> None:
    """Write a page for each public module: every public name, from its docstring."""
    rows = ""
    for name in PUBLIC:
        module = importlib.import_module(name)
        text = f"# {name}\n\n```{{eval-rst}}\n.. module:: {name}\n```\n\n{module.__doc__}\n"
        for public in public_names(module):
            kind = "class" if inspect.isclass(getattr(module, public)) else "function"
            options = "   :members:\n   :show-inheritance:\n" if kind == "class" else ""
            directive = f".. auto{kind}:: {name}.{public}\n{options}"
            text += f"\n```{{eval-rst}}\n{directive}```\n"
        site.write(f"api/{name}.md", text)
        rows += f"- [`{name}`]({name}.md): {(module.__doc__ or '').splitlines()[0]}\n"
    text = f"# Python API\n\nThe public modules. All other modules are private.\n\n{rows}"
    site.write("api/index.md", text + toctree(list(PUBLIC), options=":hidden:\n"))


def public_names(module: object) -> list[str]:
    """The functions and classes in `__all__`; without one, those that the module defines."""
    names = getattr(module, "__all__", vars(module))
    own = not hasattr(module, "__all__")
    return [
        name
        for name in names
        if inspect.isroutine(value := getattr(module, name)) or inspect.isclass(value)
        if not own
        or (not name.startswith("_") and value.__module__ == getattr(module, "__name__", ""))
    ]


class Page(HTMLParser):
    """The anchors of a page, its links, and the resources that a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value for key, value in attrs if value}
        self.anchors.update(values[key] for key in ("id", "name") if key in values)
        if tag in ("a", "area") and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "preload", "icon"):
            self.loads.add(values.get("href", ""))
        elif "src" in values:
            self.loads.add(values["src"])


def check(folder: Path) -> Iterator[str]:
    """Broken links inside the site, and resources that a page loads from the network."""
    files = folder.rglob("*.html")
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(files)}
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        for link in sorted(page.links | page.loads):
            parts = urlsplit(link)
            if parts.scheme == "data" or (parts.scheme and link not in page.loads):
                continue
            if parts.scheme or parts.netloc:
                yield f"{name}: loads {link} from the network"
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not goal.is_file():
                yield f"{name}: links to {link}, which is not on the site"
            elif anchor and goal in pages and anchor not in pages[goal].anchors:
                yield f"{name}: links to {link}, but the page has no such anchor"


def stage_pages(root: Path, stage: Path) -> None:
    shutil.rmtree(stage, ignore_errors=True)
    site = Site(root, stage)
    site.add_docs()
    for source, page in PAGES.items():
        site.add_page(source, page)
    add_commands(site)
    add_api(site)
    add_navigation(site)
    site.add_sources()
    site.write("conf.py", (HERE / "conf.py").read_text())
    site.write("_static/site.css", (HERE / "site.css").read_text())


def main(out: Path) -> int:
    stage = ROOT / "build" / "docs"
    stage_pages(ROOT, stage)
    shutil.rmtree(out, ignore_errors=True)
    sphinx = [sys.executable, "-m", "sphinx", "--builder", "html", "--quiet", "--fail-on-warning"]
    sphinx += ["--keep-going", "-d", str(ROOT / "build" / "doctrees"), str(stage), str(out)]
    status = subprocess.run(sphinx, env={**os.environ, "COLUMNS": "100"}).returncode
    if status:
        return status
    problems = list(check(out))
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"wrote {out / 'index.html'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()))
