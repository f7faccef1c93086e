"""``kvtrio chat``: talk to a running server from the terminal."""

import sys
from typing import Annotated

from cyclopts import Parameter

from kvtrio.cli import exits
from kvtrio.cli.client import ChatClient, ChatError, Message

PROMPT = "> "
GREETING = (
    "Type a message and Enter; /new starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer."
)


def chat(
    *,
    url: Annotated[
        str, Parameter(name="--url", help="The server, as `kvtrio serve` printed it.")
    ] = "http://127.0.0.1:8080",
    system: Annotated[
        str | None, Parameter(name="--system", help="Instructions that come before the chat.")
    ] = None,
    api_key: Annotated[
        str | None,
        Parameter(name="--api-key", env_var="KVTRIO_API_KEY", help="If the server asks for one."),
    ] = None,
) -> int:
    """Chat with a running server; answers appear as they are made.

    If the input is no terminal, all of it is one message, and only the answer is printed.
    """
    try:
        client = ChatClient.for_url(url, api_key)
        messages = [Message("system", system)] if system else []
        if sys.stdin.isatty():
            return _converse(client, messages)
        return _answer_once(client, messages)
    except ChatError as error:
        exits.complain(error)
        return exits.USAGE


def _answer_once(client: ChatClient, messages: list[Message]) -> int:
    try:
        text = sys.stdin.read().strip()
    except (OSError, UnicodeDecodeError):
        raise ChatError("the input cannot be read as text") from None
    if not text:
        raise ChatError("there is no message on the input")
    for piece in client.stream([*messages, Message("user", text)]):
        _show(piece)
    _show("\n")
    return exits.OK


def _converse(client: ChatClient, messages: list[Message]) -> int:
    """Read and answer until the user leaves. A failed turn is forgotten, the chat goes on."""
    print(GREETING, file=sys.stderr)
    start = list(messages)
    while (text := _read_line()) is not None:
        if text == "/new":
            messages[:] = start
        elif text:
            try:
                _turn(client, messages, text)
            except ChatError as error:
                exits.complain(error)
    return exits.OK


def _turn(client: ChatClient, messages: list[Message], text: str) -> None:
    asked, pieces = Message("user", text), list[str]()
    try:
        for piece in client.stream([*messages, asked]):
            pieces.append(piece)
            _show(piece)
    except KeyboardInterrupt:
        # Closing the connection, which the generator's end does, stops the answer on the server.
        _show(" [stopped]")
    finally:
        _show("\n")
    messages += [asked, Message("assistant", "".join(pieces))]


def _read_line() -> str | None:
    """Return the next line, or None if the user wants to leave."""
    try:
        text = input(PROMPT).strip()
    except UnicodeDecodeError:
        return ""  # no text; the prompt comes again
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None
    return None if text in ("/quit", "/exit") else text


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
