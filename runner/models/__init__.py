"""One file a model family, found by its Hugging Face `model_type`."""
