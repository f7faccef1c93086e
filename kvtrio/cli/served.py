"""What the API says of a model, from the heads of its files: names, sizes, tokenizer, template."""

import os
import time
from pathlib import Path

import gguf

from kvtrio.cli.interpreter import Pacer
from kvtrio.config import ConfigError, ModelSettings
from kvtrio.model.builtin_templates import BUILTIN_TEMPLATES
from kvtrio.model.model_file import ModelFile
from kvtrio.model.spec import ModelSpec
from kvtrio.model.template import ChatTemplate, check_usable, load_template
from kvtrio.model.tokenizer import Tokenizer, load_tokenizer
from kvtrio.serve.served import ServedModel

VOCAB_TYPES = {"llama": 1, "gpt2": 2, "gemma4": 2}
"""llama.cpp's ``llama_vocab_type`` (include/llama.h) by ``tokenizer.ggml.model``."""


def served_model(file: ModelFile, spec: ModelSpec, settings: ModelSettings) -> ServedModel:
    """What the API needs of a model besides its weights.

    Raises ``ModelFileError``, ``TemplateError`` or ``ConfigError``.
    """
    tokenizer = load_tokenizer(
        file.metadata, cutting=file.pre_tokenizer, pause=Pacer(time.thread_time, time.sleep)
    )
    template = _template(file, tokenizer, settings.chat_template)
    return ServedModel(
        alias=alias_of(file, settings),
        tokenizer=tokenizer,
        template=template,
        spec=spec,
        model_path_name=file.path.name,
        size=sum(tensor.num_bytes for tensor in file.tensors.values()),
        n_params=sum(_num_values(tensor.shape) for tensor in file.tensors.values()),
        ftype=_ftype(file),
        vocab_type=VOCAB_TYPES[str(file.metadata["tokenizer.ggml.model"])],
        template_note=_template_note(file, template, settings.chat_template),
    )


def alias_of(file: ModelFile, settings: ModelSettings) -> str:
    """Its name in answers."""
    own = file.path.resolve().name if file.path.is_dir() else file.path.stem
    return settings.alias or own


def _template(file: ModelFile, tokenizer: Tokenizer, given: str | None) -> ChatTemplate:
    is_file = given is not None and given not in BUILTIN_TEMPLATES
    override = read_template(Path(given)) if is_file and given else given
    template = load_template(file.metadata, override, tokenizer.bos_text, tokenizer.eos_text)
    check_usable(template)
    return template


def read_template(path: Path) -> str:
    """A file's template; raises ``ConfigError`` if there is none in it."""
    text = read_text(path.expanduser(), "--chat-template")
    if "{" not in text:
        what = "has no Jinja in it" if text.strip() else "is empty"
        raise ConfigError(f"--chat-template {path}: the file {what}")
    return text


def _template_note(file: ModelFile, template: ChatTemplate, given: str | None) -> str | None:
    if given is not None or file.metadata.get("tokenizer.chat_template"):
        return None
    return f"the model has no chat template; {template.name} stands in (--chat-template changes it)"


def _num_values(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _ftype(file: ModelFile) -> str:
    """Name of the file's main tensor type, as llama.cpp writes it in ``general.file_type``."""
    number = file.metadata.get("general.file_type")
    names = {kind.value: kind.name for kind in gguf.LlamaFileType}
    name = names.get(number, "unknown") if isinstance(number, int) else "unknown"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def read_text(path: Path, flag: str) -> str:
    """Return a small text file's content; raises ``ConfigError`` that names ``flag``."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {os.strerror(error.errno or 5)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: not UTF-8 text") from None
