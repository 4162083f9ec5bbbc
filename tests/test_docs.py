"""The API page builds without a warning, and every public name is on it with its docstring."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import treepack

ROOT = Path(__file__).parents[1]
TAGS = {"a", "blockquote", "code", "div", "em", "h6", "li", "ol", "p", "pre", "span", "strong", "ul"}


class DocstringFaults(HTMLParser):
    """What Markdown made of docstrings against their writers' will: tags out of `<f_j, f_i>`, lists run together."""

    def __init__(self) -> None:
        super().__init__()
        self.divs: list[bool] = []
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div":
            self.divs.append(("class", "docstring") in attrs)
        elif any(self.divs) and tag not in TAGS:
            self.found.append(f"<{tag}> {attrs}")

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self.divs.pop()

    def handle_data(self, data: str) -> None:
        if any(self.divs):
            self.found += re.findall(r"^ *(?:[-*]|\d+\.) .*$", data, flags=re.MULTILINE)


def faults(page: str) -> list[str]:
    parser = DocstringFaults()
    parser.feed(page)
    return parser.found


def test_faults_are_found() -> None:
    page = (
        "<div class='docstring'><p>see:\n    - one\n    - <code>b</code> of <f_j, f_i></p><div></div></div><p>- <x></p>"
    )
    assert [fault.split()[0] for fault in faults(page)] == ["-", "-", "<f_j,>"]


def test_api_page(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "docs" / "build.py"), str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert "Warn" not in built.stderr
    page = (tmp_path / "treepack.html").read_text()
    for name in treepack.__all__:
        assert f'id="{name}"' in page, name
    trainer = (tmp_path / "treepack" / "scoring" / "trl_hooks.html").read_text()
    assert 'id="ScoringGRPOTrainer"' in trainer
    assert faults(page) + faults(trainer) == []


def test_every_public_name_has_a_docstring() -> None:
    for name in treepack.__all__:
        if name != "__version__":
            assert (getattr(treepack, name).__doc__ or "").strip(), name
