"""Opens a model, whatever its format."""

from pathlib import Path

from kvtrio.model.folder import open_folder
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.model_file import ModelFile


def open_model(path: Path) -> ModelFile:
    """A GGUF file, the first of a split one, or a Hugging Face folder.

    Raises ModelFileError with one line that names the file or folder and what is wrong.
    """
    return open_folder(path) if path.is_dir() else open_gguf(path)
