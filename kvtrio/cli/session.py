"""``kvtrio session``: conversations that a server saved under ``--slot-save-path``."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

FOLDER_HELP = "The folder that the server was given; it may run meanwhile."
Folder = Annotated[Path, Parameter(name="--slot-save-path", help=FOLDER_HELP)]
Name = Annotated[str, Parameter(help="The session's name.")]

session = App(
    name="session",
    help="List, export, import or erase conversations that a server saved.",
    result_action="return_value",
)


@session.command(name="list")
def list_(*, folder: Folder) -> int:
    """Print each session's name, tokens, checkpoints and bytes.

    State that several sessions share counts for each of them.

    Exit codes: 0 done, 2 the folder cannot be read (one line says why), 1 a fault.
    """
    from kvtrio.cli.session_files import print_sessions

    return print_sessions(folder)


@session.command
def export(
    name: Name,
    file: Annotated[Path, Parameter(help="The file to write; there must be none.")],
    /,
    *,
    folder: Folder,
) -> int:
    """Write a session to one file that has all of it; every byte is checked.

    Like the session it holds what was said, as token ids: it is readable by its owner only.

    Exit codes: 0 done, 2 the session or the file does not permit it (one line says why), 1 a fault.
    """
    from kvtrio.cli.session_files import export_file

    return export_file(name, file, folder)


@session.command(name="import")
def import_(
    file: Annotated[Path, Parameter(help="What `kvtrio session export` wrote.")],
    name: Name,
    /,
    *,
    folder: Folder,
    api_key: Annotated[
        str | None,
        Parameter(
            name="--api-key",
            show_default=False,
            help="Whose the session is from now on: the one with this key; with an empty one, "
            "everybody's where the server asks for no key. Default: whose it was.",
        ),
    ] = None,
) -> int:
    """Add the session in a file; one of that name is replaced. Nothing changes if it is damaged.

    Exit codes: 0 done, 2 the file or the folder does not permit it (one line says why), 1 a fault.
    """
    from kvtrio.cli.session_files import import_file

    return import_file(file, name, folder, api_key)


@session.command
def erase(name: Name, /, *, folder: Folder) -> int:
    """Remove a session, and the state that no other session shares.

    Exit codes: 0 done, 2 it cannot be removed (one line says why), 1 a fault.
    """
    from kvtrio.cli.session_files import erase_session

    return erase_session(name, folder)
