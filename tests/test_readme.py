"""Every Python snippet of the README runs, in the order a reader meets them."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_snippets():
    assert len(SNIPPETS) >= 3
    names = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), names)
    assert names["scores"].names == ("solved",)
    assert names["q"].grad is not None
