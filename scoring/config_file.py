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
    for name, value in values.items():
        parameter = options.get(name.replace("_", "-"))
        if parameter is None or parameter.name is None:
            near = difflib.get_close_matches(name.replace("_", "-"), options, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(options))}"
            raise typer.BadParameter(f"{path}: {name!r} is no option of `{context.info_name}`; {hint}")
        if isinstance(value, dict | list) and not parameter.multiple:
            raise typer.BadParameter(f"{path}: {name!r} must be a single value, got {value!r}")
        if getattr(parameter, "is_flag", False) != isinstance(value, bool):
            wanted = "true or false" if not isinstance(value, bool) else "a value, not true or false"
            raise typer.BadParameter(f"{path}: {name!r} must be {wanted}, got {value!r}")
        yield parameter.name, value


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
        help="Take options from a TOML file, by their names here (token-budget = 4096); the command line wins.",
        show_default=False,
    ),
]
