"""`--config FILE`: a command's options from a TOML file; what the command line says wins."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the command that is being parsed.

    Raises:
        typer.BadParameter: the file is no TOML, or holds a name that is no option of the command, or a value of
            another kind. Values are converted and checked as the command line's are.
    """
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: not valid TOML: {error}") from error
    defaults = dict(_checked(context, path, values))
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _checked(context: typer.Context, path: Path, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    options = {_file_name(parameter): parameter for parameter in context.command.params}
    options.pop("config", None)
    known: dict[str, str] = {}
    for name, value in values.items():
        parameter = options.get(name.replace("_", "-"))
        if parameter is None or parameter.name is None:
            near = difflib.get_close_matches(name.replace("_", "-"), options, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(options))}"
            raise typer.BadParameter(f"{path}: {name!r} is no option of `{context.info_name}`; {hint}")
        if parameter.name in known:
            raise typer.BadParameter(f"{path}: {known[parameter.name]!r} and {name!r} are the same option")
        known[parameter.name] = name
        yield parameter.name, _default(parameter, value, f"{path}: {name!r}")


def _default(parameter: Any, value: Any, name: str) -> Any:
    """A value of the file as the command line would give it: words, of which click converts and checks each."""
    several = parameter.multiple or parameter.nargs == -1
    if isinstance(value, list) and several:
        return [_word(parameter, item, name) for item in value]
    word = _word(parameter, value, name)
    return [word] if several else word


def _word(parameter: Any, value: Any, name: str) -> str | bool:
    if isinstance(value, dict | list):
        raise typer.BadParameter(f"{name} must be a single value, got {value!r}")
    is_flag = getattr(parameter, "is_flag", False)
    if is_flag != isinstance(value, bool):
        wanted = "true or false" if is_flag else "a value, not true or false"
        raise typer.BadParameter(f"{name} must be {wanted}, got {value!r}")
    return value if is_flag else str(value)  # as text, 2.5 is no integer: click would cut the number


def _file_name(parameter: Any) -> str:
    """An option's long name without its dashes, an argument's own name."""
    long = [option for option in parameter.opts if option.startswith("--")]
    return long[0].removeprefix("--") if long else str(parameter.name)


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        is_eager=True,
        callback=_read,
        help="Take options from a TOML file, by their names here (token-budget = 4096), a list for what is "
        "repeated; the command line wins.",
        show_default=False,
    ),
]
