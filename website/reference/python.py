"""Page of the Python API: every public name of ``hlat`` with its signature and docstring."""

import inspect
import re

import hlat


def names() -> list[str]:
    """Return the public names of ``import hlat``."""
    return sorted(name for name in dir(hlat) if not name.startswith("_") and name in hlat._HOMES)


def python_page() -> str:
    """Return the page."""
    found = {name: getattr(hlat, name) for name in names()}
    functions = {name: one for name, one in found.items() if inspect.isfunction(one)}
    errors = {name: one for name, one in found.items() if inspect.isclass(one) and issubclass(one, Exception)}
    classes = {name: one for name, one in found.items() if name not in functions and name not in errors}
    lines = [
        "# Python",
        "",
        "Every public name of `import hlat`, generated from signatures and docstrings. [Use hlat from",
        "Python](../python.md) explains what holds for all of them.",
        "",
        "## Functions",
        "",
    ]
    for name, one in functions.items():
        lines += [
            f"### `{name}` {{#{name.lower()}}}",
            "",
            "```python",
            _signature(name, one),
            "```",
            "",
            _docstring(one),
            "",
        ]
    lines += ["## Classes", ""]
    for name, one in classes.items():
        lines += [f"### `{name}` {{#{name.lower()}}}", "", _docstring(one), ""]
    lines += ["## Errors", "", "| error | meaning | exit code of the command |", "|---|---|---|"]
    for name, one in errors.items():
        first = " ".join((inspect.getdoc(one) or "").partition("\n\n")[0].split())
        lines.append(f"| `{name}` | {first} | {one.exit_code} |")
    return "\n".join([*lines, ""])


def _signature(name: str, function: object) -> str:
    signature = inspect.signature(function)
    rows, keyword = [], False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not keyword:
            keyword = True
            rows.append("    *,")
        rows.append(f"    {one.replace(annotation=one.empty)},")
    return "\n".join([f"hlat.{name}(", *rows, ")"])


def _docstring(one: object) -> str:
    """Markdown of a docstring in Google's style: sections become lists."""
    lines = []
    for line in (inspect.getdoc(one) or "").splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes|Example|Examples):", line)
        entry = re.match(r"    (\*{0,2}[\w.]+(?:, [\w.]+)*): (.*)", line)
        if heading:
            lines += ["", f"**{heading[1].replace('Args', 'Arguments')}**", ""]
        elif entry:
            lines.append(f"- `{entry[1].replace(', ', '`, `')}`: {entry[2]}")
        elif line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line.strip() if line.startswith("    ") else line)
    return "\n".join(lines).replace("``", "`")
