"""Files to data: model files, tokenizers, chat templates."""
